"""Reading a step from its folder into new tensors, without an agent and without objects to restore into."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from zerostall.core import matching
from zerostall.core.exchange import MODULE_KINDS
from zerostall.flow.whole_step import opened_step
from zerostall.trainer.state.load import tree

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


def load(
    where: str | os.PathLike[str], step: int | None = None, only: str | Sequence[str] | None = None
) -> dict[str, object]:
    """Return what was saved, as new CPU tensors in plain containers, by the names given to `Checkpointer`.

    A module is a flat dict of tensors by path, an optimizer has "state" by parameter and "param_groups".

    >>> zerostall.load("runs/gpt", only="model.head.*")["model"]["head.weight"]

    Args:
        where: the run's folder.
        step: which step; None is the newest clean one.
        only: patterns of names as in `restore`: `model` or `model.*`. Of a module those tensors are taken that fit, of
            everything else the whole.

    Raises:
        SnapshotNotFoundError: there is no such folder or step.
        CorruptError: the step is damaged.
        ValueError: a pattern fits nothing.
    """
    with opened_step(where, step) as found:
        merged = found.merged()
        loaded = tree(merged, found.image(merged), found.ranks)
        if only is None:
            return loaded
        globs = [only] if isinstance(only, str) else list(only)
        modules = {root for root, kind in found.kinds.items() if kind in MODULE_KINDS}
        for glob in globs:
            if not _taken(loaded, modules, [glob.removeprefix("!")]):
                there = ", ".join(loaded)
                raise ValueError(f"only {glob}: step {found.step} holds nothing of that name; it holds {there}")
        return _taken(loaded, modules, globs)


def _taken(loaded: dict[str, object], modules: set[str], globs: Sequence[str]) -> dict[str, object]:
    selection = matching.select([*globs, *(f"{glob}.*" for glob in globs)])  # a name is all that lies below it, too
    taken: dict[str, object] = {}
    for root, part in loaded.items():
        if root in modules:
            tensors = cast("dict[str, object]", part)
            fitting = {path: one for path, one in tensors.items() if selection.takes(f"{root}.{path}")}
            if fitting:
                taken[root] = fitting
        elif selection.takes_part(root):
            taken[root] = part
    return taken
