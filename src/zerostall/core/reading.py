"""What an optimizer and a snapshot in progress ask of each other, so that neither has to know the other.

An optimizer that *flips* writes the next moments of tensors that are still to be read to other memory and goes on from
there; what it leaves behind is the snapshot. Parameters never move: their old values are stored aside as they are
updated.

    pending = reader.pending()            what nobody has begun to read
    claim = reader.claim(left, kept)      from here on all other tensors may be changed
    ... the step: `left` memory stays as it is, the old bytes of `kept` go elsewhere
    claim.release()                       they are there
    claim.over()                          nothing of it will be read any more: the memory can be used again
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Memory(Protocol):
    """A tensor, as far as it matters here."""

    def data_ptr(self) -> int: ...


class Claim(Protocol):
    """Memory that a snapshot may go on reading although its optimizer has taken a step."""

    def release(self) -> None:
        """Say that the old bytes of everything that was kept are in their place. Must follow every claim.

        One that the thread has left behind, for Ctrl-C came, costs the snapshot: by the next call of the reader.
        """
        ...

    def over(self) -> bool:
        """Whether nothing will be read any more."""
        ...


Placed: TypeAlias = tuple[int, Memory]
"""A place in the image, and a tensor."""


class Reader(Protocol):
    """The snapshot in progress, as an optimizer sees it. Called by the thread that trains."""

    def pending(self) -> Mapping[tuple[int, int], int] | None:
        """Address and size in bytes → place in the image, of what is still to be read; None: there is no snapshot."""
        ...

    def claim(self, left: Sequence[Placed], kept: Sequence[Placed]) -> Claim:
        """Return when everything else may be changed.

        Args:
            left: places with their memory, which stays as it is until the claim is over.
            kept: places with the memory in which their bytes of now will lie, shaped alike, by `release`.

        The memory is held until it has been read.
        """
        ...


@runtime_checkable
class Flipping(Protocol):
    """An optimizer that can flip."""

    def flip_for(self, reader: Reader | None, nbytes: int) -> str | None:
        """Ask `reader` before every step from now on, and use up to `nbytes` of memory more; None: ask nobody.

        Returns:
            Why that cannot be, or None.
        """
        ...
