"""What a user asks back of a stored step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.core import matching
from zerostall.trainer.state import tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from zerostall.core.matching import Strict


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which of it, under which names, and how well it must fit; see `Checkpointer.restore`.

    Attributes:
        only, rename, strict, prefixes: as in `core.matching.match`.
        meta_to: tensors on the meta device get memory there, where something is stored for them.
    """

    only: str | Sequence[str] | None = None
    rename: Mapping[str, str] | None = None
    strict: Strict = True
    prefixes: bool = False
    meta_to: str | torch.device | None = None

    def insist(self) -> None:
        """ValueError, TypeError or CapabilityError, by the option's name, for what makes no sense here."""
        matching.select(self.only, self.rename)
        matching.insist_on_strict(self.strict)
        if self.meta_to is not None:
            tensors.insist_on_device(tensors.device_of(self.meta_to, "meta_to"), "meta_to")

    @property
    def globs(self) -> list[str] | None:
        """`only` as a list."""
        return matching.patterns(self.only)


EVERYTHING = Asked()
