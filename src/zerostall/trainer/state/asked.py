"""What a user asks back of a stored step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    @property
    def globs(self) -> list[str] | None:
        """`only` as a list."""
        return [self.only] if isinstance(self.only, str) else None if self.only is None else list(self.only)


EVERYTHING = Asked()
