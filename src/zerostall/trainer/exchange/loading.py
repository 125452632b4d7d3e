"""Reading a step from its folder into new tensors, without an agent and without objects to restore into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.errors import SnapshotNotFoundError
from zerostall.flow.catalog import opened_run
from zerostall.flow.export import opened_image
from zerostall.trainer.state.load import tree

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from zerostall.flow.image_reader import ImageReader


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
    with opened_run(where) as disk, opened_image(disk, step) as reader:
        found = tree(reader.stored, memoryview(whole(reader)))
        if names is None:
            return found
        chosen = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in chosen if name not in found]
        if unknown:
            step = reader.stored.record.step
            raise SnapshotNotFoundError(f"step {step} holds no {', '.join(unknown)}; it holds {', '.join(found)}")
        return {name: found[name] for name in chosen}


def whole(reader: ImageReader) -> bytearray:
    """The whole image, every chunk checked."""
    image = bytearray(reader.stored.record.nbytes)
    at = 0
    for index in range(reader.chunks):
        chunk = reader.chunk(index)
        image[at : at + len(chunk)] = chunk
        at += len(chunk)
    return image
