"""Which of the user's state is saved, and what tells the rest from another that would be put in its place."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from zerostall import native
from zerostall.config import Frozen
from zerostall.core import matching, names
from zerostall.core.matching import Selection
from zerostall.trainer.state import tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

_WHOLE = 1 << 20
_WINDOWS = 16
_WINDOW = 64 << 10


_ALL = Selection()


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user wants saved.

    A module is chosen tensor by tensor, everything else as a whole; a pattern that takes a root takes all below it.

    Attributes:
        selection: by name.
        frozen: whether parameters that ask for no gradient are saved.
        alone: whether a pattern must fit something here, for there is no other rank that it may be meant for.
    """

    selection: Selection = _ALL
    frozen: bool = True
    alone: bool = True

    @staticmethod
    def of(only: str | Sequence[str] | None, frozen: Frozen, *, alone: bool) -> Choice:
        if frozen not in get_args(Frozen):
            raise ValueError(f"frozen={frozen!r} is neither 'save' nor 'leave'")
        return Choice(matching.select(only), frozen == "save", alone)

    @property
    def by_name(self) -> bool:
        """Whether names matter at all."""
        return self.selection.only is not None or bool(self.selection.never)

    def takes(self, root: str, name: str) -> bool:
        """Return whether the tensor or part of that name, below that root, is saved."""
        chosen = self.selection
        if any(glob.fits(text) for glob in chosen.never for text in (name, name + ".")):
            return False
        return chosen.takes_part(name) or chosen.takes_part(root)

    def covers(self, stored: str) -> bool:
        """Return whether what is stored under that name concerns this choice."""
        return not self.by_name or self.takes(names.child("", names.split(stored)[0]), stored)

    def insist_on_use(self, asked: Iterable[str]) -> None:
        """ValueError where a pattern fits none of the names that were asked about."""
        if self.alone:
            matching.insist_on_use(self.selection, asked)


def identity(left_out: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest over tensors that are not saved: names, types, shapes, and bytes, of large ones a sample.

    Another set of pretrained weights differs nearly everywhere, so that a sample of a megabyte tells; reading all of a
    large model each time training begins would not be worth it.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(left_out, key=lambda item: item[0]):
        facts = (name, tensors.dtype_name(tensor), tuple(tensor.shape), _sample(tensor))
        digest.update(repr(facts).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> int | None:
    """CRC-32C of some of the bytes; None where there are none to be had."""
    if tensors.problem(tensor) is not None or not tensors.is_plain(tensor) or tensors.is_distributed(tensor):
        return None
    flat = tensor.detach().reshape(-1)
    if flat.nbytes <= _WHOLE:
        windows = [flat]
    else:
        size = _WINDOW // flat.itemsize
        last = flat.numel() - size
        windows = [flat[at : at + size] for at in (last * k // (_WINDOWS - 1) for k in range(_WINDOWS))]
    value = 0
    for window in windows:
        here = window.cpu().contiguous()
        value = native.crc32c_memory(here.data_ptr(), here.nbytes, value) if here.nbytes else value
    return value
