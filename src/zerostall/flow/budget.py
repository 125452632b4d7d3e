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
                f"{what}: {nbytes} bytes of shared memory are needed; {self.lent} of {self.limit} are lent",
                hint="set ZEROSTALL_HOST_BUDGET higher and end the agent (`zerostall agent stop`), or use fewer slots",
            )
        self.lent += nbytes

    def give_back(self, nbytes: int) -> None:
        self.lent -= nbytes
