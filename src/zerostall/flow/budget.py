"""How much shared memory may be lent on this node."""

from __future__ import annotations

from dataclasses import dataclass

from zerostall.errors import CapacityError


@dataclass(slots=True)
class Budget:
    """Bytes lent and the most that may be. One thread drives it."""

    limit: int
    lent: int = 0

    def fits(self, nbytes: int) -> bool:
        return self.lent + nbytes <= self.limit

    def take(self, nbytes: int, what: str) -> None:
        """Count `nbytes` as lent.

        Raises:
            CapacityError: with what is needed, lent and allowed.
        """
        if not self.fits(nbytes):
            raise CapacityError(
                f"{what} needs {nbytes} bytes of shared memory; {self.lent} of {self.limit} are lent",
                hint="raise ZEROSTALL_HOST_BUDGET and restart the agent, or use fewer slots",
            )
        self.lent += nbytes

    def give_back(self, nbytes: int) -> None:
        self.lent -= nbytes
