"""A step as one safetensors file, for people who do not have zerostall.

Each tensor is written once. Another name for the very same tensor (tied weights) is not written again but noted in the
file's `__metadata__` as `{"alias": "name"}`, as `safetensors.torch.save_model` does and as loaders of tied models
expect. Views of another kind (a slice, a transposed tensor) are written out in full under their own names.
Types that have no safetensors code of their own are written under one of the same size; `zerostall.dtypes` in the
metadata then tells the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from zerostall.core import names as paths
from zerostall.core import safetensors
from zerostall.core.contents import Content, contents, runs
from zerostall.core.dtypes import CODES, DTYPES
from zerostall.core.safetensors import Slot
from zerostall.errors import CapabilityError
from zerostall.flow.catalog import Progress, existing, image_path, newest, opened_run
from zerostall.flow.image_reader import ImageReader, buffer
from zerostall.flow.new_file import new_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from zerostall.core.layout import Layout
    from zerostall.tiers.disk import DiskTier

DTYPES_KEY = "zerostall.dtypes"
"""Metadata key of the true types, a JSON object of name to type, for those that the header cannot tell."""

_BLOCK = 1 << 20
_INTEGERS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        step: of which step.
        tensors: how many tensors it holds.
        aliases: names that are only noted, and what they are noted as aliases of.
        nbytes: size of the file.
    """

    path: str
    step: int
    tensors: int
    aliases: dict[str, str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a step to export, as the user said it.

    Attributes:
        only: patterns over full names (`model.encoder.*`); None takes all.
        root: take only what lies below this name, and leave the name itself out: `model.layers.0.weight` becomes
            `layers.0.weight`, spelled as `state_dict()` does.
    """

    only: tuple[str, ...] | None = None
    root: str | None = None

    @staticmethod
    def of(only: str | Sequence[str] | None, root: str | None) -> Selection:
        return Selection((only,) if isinstance(only, str) else None if only is None else tuple(only), root)

    def names(self, layout: Layout) -> dict[str, Content]:
        """The chosen tensors under the names they get. ValueError where there is none, or a name twice."""
        chosen: dict[str, Content] = {}
        for content in contents(layout):
            if self.only is not None and not any(fnmatchcase(content.name, glob) for glob in self.only):
                continue
            name = self._shortened(content.name)
            if name is None:
                continue
            if name == "__metadata__":
                raise ValueError(f"{content.name!r} cannot be called {name!r}: safetensors keeps that name for itself")
            if name in chosen:
                raise ValueError(f"{chosen[name].name!r} and {content.name!r} would both become {name!r}")
            chosen[name] = content
        if not chosen and (self.only is not None or self.root is not None):
            roots = sorted({str(paths.split(entry.name)[0]) for entry in layout.entries})
            asked = f"only {', '.join(self.only)}" if self.only is not None else f"root {self.root}"
            raise ValueError(f"{asked}: no tensor has such a name; names begin with {', '.join(roots) or 'nothing'}")
        return chosen

    def _shortened(self, name: str) -> str | None:
        if self.root is None:
            return name
        path, root = paths.split(name), paths.split(self.root)
        if path[: len(root)] != root or len(path) == len(root):
            return None
        rest = path[len(root) :]
        texts = [part for part in rest if isinstance(part, str)]
        return ".".join(texts) if len(texts) == len(rest) else paths.join(rest)


def export_safetensors(
    where: str | os.PathLike[str],
    step: int | None,
    out: str | os.PathLike[str],
    *,
    only: str | Sequence[str] | None = None,
    root: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a step (None: the newest clean one) as one safetensors file.

    Every byte is checked as it is read. Memory: a chunk, and for a view that is not in order the tensor it looks into.
    The file is there whole or not at all.

    Raises:
        SnapshotNotFoundError: no such step.
        CorruptError: the step is damaged.
        CapabilityError: its tensors are spread over several ranks.
        StorageError: `out` is there already, or cannot be written.
        ValueError: nothing is selected, or `out` lies in the run's own folder.
    """
    selection = Selection.of(only, root)
    with opened_run(where) as disk, opened_image(disk, step) as reader:
        refuse_inside(disk, Path(out))
        chosen = selection.names(reader.stored.layout)
        kept, aliases = once(chosen)
        order = sorted(kept, key=lambda name: (-DTYPES[kept[name].dtype].itemsize, name))
        header = _header(kept, order, aliases)
        nbytes = len(header) + sum(content.nbytes for content in kept.values())
        with new_file(Path(out), overwrite=overwrite, nbytes=nbytes) as file:
            file.write(header)
            done = len(header)
            for name in order:
                for piece in elements(reader, kept[name]):
                    file.write(piece)
                    done += len(piece)
                    if progress is not None:
                        progress(done, nbytes)
        return Exported(str(Path(out).absolute()), reader.stored.record.step, len(kept), aliases, nbytes)


def opened_image(disk: DiskTier, step: int | None) -> ImageReader:
    """The image of a step that one rank holds whole.

    Raises:
        SnapshotNotFoundError, CorruptError, CapabilityError: as `export_safetensors`.
    """
    step = newest(disk) if step is None else existing(disk, step)
    world = disk.manifest(step).world
    if world != 1:
        raise CapabilityError(f"step {step} is spread over {world} ranks; this version exports those of one")
    return ImageReader(image_path(disk, step, 0), disk.open(step, 0))


def refuse_inside(disk: DiskTier, out: Path) -> None:
    """ValueError where `out` lies in the run's folder, whose files are not for writing over."""
    if disk.where.resolve() in out.resolve().parents:
        raise ValueError(f"{out} lies in the run's own folder: export to somewhere else")


def once(chosen: dict[str, Content]) -> tuple[dict[str, Content], dict[str, str]]:
    """What is written, and the other names of the same tensors → the name each is written under."""
    kept: dict[str, Content] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    # An entry's own name before its aliases.
    for name, content in sorted(chosen.items(), key=lambda item: bool(item[1].alias_of)):
        view = content.view
        place = (view.start, view.strides) if view is not None else ()
        key = (content.entry.name, content.dtype, content.shape, place)
        # Empty tensors have no bytes to share.
        if key in seen and content.nbytes:
            aliases[name] = seen[key]
        else:
            kept[name] = content
            seen[key] = name
    return kept, aliases


def elements(reader: ImageReader, content: Content) -> Iterator[memoryview]:
    """Yield a tensor's elements in row-major order, checked, in pieces good until the next is asked for."""
    if content.view is None:
        yield from reader.read(content.entry.offset, content.nbytes)
        return
    itemsize = DTYPES[content.dtype].itemsize
    shape, strides = content.shape, content.view.strides
    start = content.entry.offset + content.view.start
    spans = runs(shape, strides)
    first = next(spans, None)
    if first is None:
        return
    if next(spans, None) is None and first[2] == 1:
        yield from reader.read(start, content.nbytes)
        return
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    base = buffer(extent * itemsize)
    at = 0
    for piece in reader.read(start, extent * itemsize):
        base[at : at + len(piece)] = piece
        at += len(piece)
    yield from _gathered(memoryview(base), shape, strides, itemsize)


def _gathered(base: memoryview, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Iterator[memoryview]:
    if itemsize not in _INTEGERS:  # complex128 goes as two of 8 bytes
        shape, strides, itemsize = (*shape, 2), (*(2 * stride for stride in strides), 1), 8
    items = base.cast(_INTEGERS[itemsize])
    most = _BLOCK // itemsize
    block = bytearray()
    for start, count, stride in runs(shape, strides):
        for skipped in range(0, count, most):
            size = min(most, count - skipped)
            if stride == 0:
                block += bytes(items[start : start + 1]) * size
            else:
                begin = start + skipped * stride
                block += items[begin : begin + (size - 1) * stride + 1 : stride].tobytes()
            if len(block) >= _BLOCK:
                yield memoryview(block)
                block = bytearray()
    if block:
        yield memoryview(block)


def _header(kept: dict[str, Content], order: list[str], aliases: dict[str, str]) -> bytes:
    slots: dict[str, Slot] = {}
    true_types: dict[str, str] = {}
    begin = 0
    for name in order:
        content = kept[name]
        dtype = DTYPES[content.dtype]
        slots[name] = Slot(dtype.code, (*content.shape, *dtype.trailing), (begin, begin + content.nbytes))
        begin += content.nbytes
        if CODES[dtype.code] != dtype:
            true_types[name] = dtype.name
    metadata = {**aliases, "format": "pt"}
    if true_types:
        metadata[DTYPES_KEY] = msgspec.json.encode(true_types).decode()
    header = safetensors.encode(slots, metadata)
    if len(header) > safetensors.MAX_HEADER:
        raise CapabilityError(
            f"{len(order)} tensors make a header of {len(header)} bytes, more than any reader takes",
            hint="export parts of it with only=",
        )
    return header
