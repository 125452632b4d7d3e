"""Reading a step from its folder into new tensors, without an agent and without objects to restore into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.errors import SnapshotNotFoundError
from zerostall.flow.whole_step import opened_step
from zerostall.trainer.state.load import tree

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


def load(
    where: str | os.PathLike[str], step: int | None = None, names: str | Sequence[str] | None = None
) -> dict[str, object]:
    """Return what was saved, as new CPU tensors in plain containers, by the names given to `Checkpointer`.

    A module is a flat dict of tensors by path, an optimizer has "state" by parameter and "param_groups".

    Args:
        where: the run's folder.
        step: which step; None is the newest clean one.
        names: take only these of the names given to `Checkpointer`.

    Raises:
        SnapshotNotFoundError: there is no such folder, step or name.
        CorruptError: the step is damaged.
    """
    with opened_step(where, step) as found:
        merged = found.merged()
        loaded = tree(merged, found.image(merged), found.ranks)
        if names is None:
            return loaded
        chosen = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in chosen if name not in loaded]
        if unknown:
            raise SnapshotNotFoundError(
                f"step {found.step} holds no {', '.join(unknown)}; it holds {', '.join(loaded)}"
            )
        return {name: loaded[name] for name in chosen}
