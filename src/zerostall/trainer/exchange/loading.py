"""Reading a step, or anybody's safetensors files, into new tensors, without an agent and without objects to restore."""

from __future__ import annotations

import contextlib
import ctypes
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from zerostall import config
from zerostall.core import matching
from zerostall.core import steps as step_names
from zerostall.core.exchange import MODULE_KINDS
from zerostall.core.mosaic import row_major
from zerostall.errors import SnapshotNotFoundError, ZerostallError
from zerostall.flow.foreign_safetensors import index_in, read_huggingface, read_safetensors
from zerostall.flow.present import again
from zerostall.flow.readable import OpenFile
from zerostall.flow.whole_step import opened_step
from zerostall.tiers.image_bytes import FileBytes
from zerostall.tiers.urls import is_url
from zerostall.trainer.exchange.filling import Place, fill, new_bytes
from zerostall.trainer.exchange.passing_on import Beginning
from zerostall.trainer.exchange.store_reads import fill_from_images
from zerostall.trainer.file_loads import File
from zerostall.trainer.state import tensors, writes
from zerostall.trainer.state.load import tree_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from zerostall.core.boxes import Box
    from zerostall.core.pieces import Piece
    from zerostall.core.shards import Entry
    from zerostall.flow.torch_archive import Loose
    from zerostall.flow.whole_step import WholeStep


def load(
    where: str | os.PathLike[str],
    step: int | None = None,
    only: str | Sequence[str] | None = None,
    *,
    device: str | torch.device | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, object]:
    """Return what was saved, as new tensors in plain containers, by the names given to `Checkpointer`.

    A module is a flat dict of tensors by path, an optimizer has "state" by parameter and "param_groups". Of a
    safetensors file, a Hugging Face folder or its index: every tensor by its name.

    >>> zerostall.load("runs/gpt", only="model.head.*")["model"]["head.weight"]

    Args:
        where: the run's folder or URL, a .safetensors file, a Hugging Face folder, or the index of one.
        step: which step of a run; None is the newest clean one.
        only: patterns of names as in `restore`: `model` or `model.*`; no more is read than they need. Of a module, and
            of files, those tensors are taken that fit, of everything else the whole.
        device: where the tensors are to be; None is the CPU.
        process_group: ranks of which each reads a part and gives it to the others, so that disk and store are read
            once. All of them call this with the same arguments and a device that the group's backend can send from.

    Raises:
        SnapshotNotFoundError: there is no such folder or step.
        CorruptError: the step or a file is damaged.
        CapabilityError: there is no such device here.
        ValueError: a pattern fits nothing.
    """
    globs = matching.patterns(only)
    goal = tensors.device_of("cpu" if device is None else device)
    read = partial(_load, where, step, globs, goal, process_group)
    return again(read) if process_group is None else read()  # ranks would have to agree to read once more


def _load(
    where: str | os.PathLike[str],
    step: int | None,
    globs: Sequence[str] | None,
    goal: torch.device,
    process_group: dist.ProcessGroup | None,
) -> dict[str, object]:
    files, step = _agreed(where, step, process_group)
    with Beginning(goal, process_group) as beginning:
        tensors.insist_on_device(goal)
        index = _index_of(where)
        if files is not None and files != (index is not None):
            raise SnapshotNotFoundError(f"{where} is not on this rank what it is on rank 0")
        if index is not None:
            return _load_files(index, globs, goal, process_group, beginning)
        return _load_step(where, step, globs, goal, process_group, beginning)


def _load_step(
    where: str | os.PathLike[str],
    step: int | None,
    globs: Sequence[str] | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
    beginning: Beginning,
) -> dict[str, object]:
    with opened_step(where, step) as found:
        merged = found.merged()
        modules = {root for root, kind in found.kinds.items() if kind in MODULE_KINDS}
        loaded = tree_of(
            merged,
            found.ranks,
            lambda entries: _fetched(found, entries, device, group, beginning),
            None if globs is None else _need(globs, modules),
        )
        if globs is None:
            return loaded
        for glob in globs:
            if not _taken(loaded, modules, [glob.removeprefix("!")]):
                there = ", ".join(loaded)
                raise ValueError(f"only {glob}: step {found.step} holds nothing of that name; it holds {there}")
        return _taken(loaded, modules, globs)


def _agreed(
    where: str | os.PathLike[str], step: int | None, group: dist.ProcessGroup | None
) -> tuple[bool | None, int | None]:
    """The same on all ranks of a group: whether files or a run are read, if that is known, and which step.

    What is the newest may change while they look.
    """
    if group is None:
        return None, step
    told: list[bool | int | None] = [None, step]
    if dist.get_rank(group) == 0:
        with contextlib.suppress(ZerostallError, OSError, ValueError):  # each rank raises it for itself
            told[0] = _index_of(where) is not None
            if step is None and not told[0]:
                with opened_step(where, None) as found:
                    told[1] = found.step
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
    files, step = told
    return None if files is None else bool(files), step


def _need(globs: Sequence[str], modules: set[str]) -> Callable[[str, str], bool]:
    """Whether a tensor, by its root and its name, is needed for what `_taken` takes."""
    selection = matching.select(globs)
    return lambda root, name: selection.takes(name) if root in modules else selection.takes_part(root)


def _taken(loaded: dict[str, object], modules: set[str], globs: Sequence[str]) -> dict[str, object]:
    selection = matching.select(globs)
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


def _index_of(named: str | os.PathLike[str]) -> Path | None:
    """The safetensors file or index that is meant; None where `named` is no such thing."""
    if is_url(str(named)):
        return None
    where = Path(named)
    if where.is_file():
        return where
    if not where.is_dir() or (where / step_names.RUN).exists() or (where / step_names.LAYOUTS).exists():
        return None
    return index_in(where)


def _load_files(
    index: Path,
    globs: Sequence[str] | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
    beginning: Beginning,
) -> dict[str, object]:
    with contextlib.ExitStack() as stack:
        read = read_huggingface if index.suffix == ".json" else read_safetensors
        found = _fitting(read(index, stack), globs, index)
        made: dict[object, torch.Tensor] = {}
        places: dict[OpenFile, list[Place]] = {}
        for loose in found.values():
            source = loose.sources[0]
            assert isinstance(source, OpenFile)
            if loose.place not in made:
                data = new_bytes(loose.nbytes, device, loose.tiles[0].offset)
                places.setdefault(source, []).append(Place(loose.tiles[0].offset, data))
                made[loose.place] = data.view(tensors.torch_dtype(loose.dtype)).view(loose.shape)
        beginning.over()
        fill([(File(file.fd, file.path, file.nbytes), some) for file, some in places.items()], device, group)
        return {name: made[loose.place] for name, loose in found.items()}


def _fitting(found: dict[str, Loose], globs: Sequence[str] | None, index: Path) -> dict[str, Loose]:
    for glob in globs or ():
        if not any(map(matching.select([glob.removeprefix("!")]).takes, found)):
            raise ValueError(f"only {glob}: {index} holds nothing of that name; it holds {len(found)} tensors")
    return found if globs is None else {name: one for name, one in found.items() if matching.select(globs).takes(name)}


def _fetched(
    found: WholeStep,
    entries: Sequence[Entry],
    device: torch.device,
    group: dist.ProcessGroup | None,
    beginning: Beginning,
) -> dict[str, torch.Tensor]:
    """New tensors with the bytes of these entries of the merged image."""
    flat: dict[str, torch.Tensor] = {}
    places: list[list[Place]] = [[] for _ in found.ranks]
    apart: list[tuple[torch.Tensor, Box, torch.Tensor]] = []  # boxes that lie scattered in their tensor
    others: list[str] = []
    for entry in entries:
        pieces = found.pieces(entry.name)
        offset = pieces[0].offset if pieces else 0
        flat[entry.name] = new_bytes(entry.nbytes, device, offset)
        if pieces is None:
            others.append(entry.name)
            continue
        for piece in pieces:
            target = _within(flat[entry.name], piece, entry.shape)
            if target is None:
                target = new_bytes(piece.nbytes, device, piece.offset)
                apart.append((_typed(flat[entry.name], entry.dtype, entry.shape), piece.box, target))
            places[piece.rank].append(Place(piece.offset, target))
    images = [(rank, some) for rank, some in enumerate(places) if some]
    files = [(file, some) for rank, some in images if (file := _file(found, rank)) is not None]
    stored = [(found.image_of(rank), some) for rank, some in images if _file(found, rank) is None]
    beginning.over()
    fill(files, device, group)
    fill_from_images(stored, device, group)
    _read_piecewise(found, {name: flat[name] for name in others})
    for whole, box, target in apart:
        part = whole[tuple(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))]
        writes.copy_into(part, target.view(whole.dtype).view(box.shape))
    return {entry.name: _typed(flat[entry.name], entry.dtype, entry.shape) for entry in entries}


def _typed(flat: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    return flat.view(tensors.torch_dtype(dtype)).view(tuple(shape))


def _file(found: WholeStep, rank: int) -> File | None:
    """One rank's image, if it is a file here."""
    source, record = found.source(rank), found.ranks[rank].record
    if not isinstance(source, FileBytes):
        return None
    return File(source.fileno(), source.path, record.nbytes, record.chunk_bytes, record.checksums)


def _within(flat: torch.Tensor, piece: Piece, shape: Sequence[int]) -> torch.Tensor | None:
    """The bytes of a tensor of that shape that a piece of it is, if they lie in one run; else None."""
    box = piece.box
    whole = len(shape)
    while whole and box.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    if any(size != 1 for size in box.shape[: max(whole - 1, 0)]):
        return None
    first = sum(start * stride for start, stride in zip(box.start, row_major(shape), strict=True))
    begin = first * piece.nbytes // max(math.prod(box.shape), 1)
    return flat[begin : begin + piece.nbytes]


def _read_piecewise(found: WholeStep, flat: Mapping[str, torch.Tensor]) -> None:
    """What lies in no simple way, several tensors at a time; each chunk is checked before it is used."""

    def read(name: str) -> None:
        target = flat[name]
        host = target if target.device.type == "cpu" else torch.empty(target.numel(), dtype=torch.uint8)
        if host.numel():
            view = memoryview((ctypes.c_char * host.numel()).from_address(host.data_ptr())).cast("B")
            found.readable(found.tensors[name]).read_into(view, 0)
        if host is not target:
            target.copy_(host)

    if not flat:
        return
    with ThreadPoolExecutor(config.restore_threads(), "zerostall-load") as threads:
        list(threads.map(read, sorted(flat, key=lambda name: found.order(found.tensors[name]))))
