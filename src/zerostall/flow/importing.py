"""Other people's checkpoints as a step of a run: laid out as one image, written block by block, committed.

A tensor `layers.0.weight` of a file becomes `model.layers.0.weight`, as a module given as `model=` would be saved, so
that `restore(only="model.*")` finds it.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from zerostall import config, native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.layout import CHUNK, Layout, Shard
from zerostall.core.manifest import Manifest, Record, RunFacts
from zerostall.errors import FormatError, RunMismatchError, SnapshotNotFoundError, StepExistsError
from zerostall.flow.catalog import opened_remote
from zerostall.flow.export import INDEX, meter
from zerostall.flow.folder_lock import FolderLock
from zerostall.flow.foreign_dcp import METADATA, read_dcp
from zerostall.flow.foreign_safetensors import index_in, read_huggingface, read_safetensors
from zerostall.flow.foreign_torch import items_in, read_torch, read_torch_checkpointing
from zerostall.flow.forest import Forest
from zerostall.flow.pour import Place, chunk_sums, pour
from zerostall.flow.readable import Plain
from zerostall.tiers.contract import Image
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.files import real, storage_errors
from zerostall.tiers.holding import step_here
from zerostall.tiers.host import stride_of
from zerostall.tiers.urls import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zerostall.core.exchange import ImportFormat, ImportOptions
    from zerostall.core.values import Document
    from zerostall.flow.catalog import Progress
    from zerostall.flow.forest import Harvest, Inert
    from zerostall.flow.readable import Convert
    from zerostall.tiers.contract import RunTier

_THREADS = 2
_SWELLS = 64
_ANYHOW = 1 << 30
"""Tensors may have so many times the bytes of the files that they lie in, or so many bytes anyhow."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What was stored: where, as which step, how many tensors, how many bytes."""

    where: str
    step: int
    tensors: int
    aliases: int
    nbytes: int


def import_foreign(
    source: Path,
    where: str | os.PathLike[str],
    step: int,
    options: ImportOptions,
    *,
    convert: Convert | None = None,
    inert: Inert | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Store somebody's checkpoint as a step of the run in `where`. No code of it is run.

    Read and written in blocks, on a few threads. Memory: a few blocks (under 100 MB), and for a tensor that is stored
    in another order than its own all that it spans.

    Raises:
        SnapshotNotFoundError: there is no such file or folder.
        FormatError: it is not what it claims to be, is damaged, or would need code of its own to be read.
        StateError: it holds something that cannot be stored; names it.
        StepExistsError: the step is there, and `replace` was not said.
        RunMismatchError: the folder belongs to a run of another name.
        RunBusyError: an agent or another import writes to the folder.
        StorageError: the disk refused.
        ValueError: nothing is chosen, or the options do not go with this kind of checkpoint.
    """
    with contextlib.ExitStack() as stack:
        try:
            loaded = _loaded(source, options, stack)
        except FileNotFoundError as error:
            if isinstance(error, SnapshotNotFoundError):
                raise
            raise SnapshotNotFoundError(f"{source} does not exist") from None
        harvest = Forest(options, convert, inert).take(chosen_entry(loaded, options.key, source))
        _refuse_a_bomb(source, sum(tensor.nbytes for tensor in harvest.tensors.values()))
        return store_tensors(where, step, harvest, run=options.run, replace=options.replace, progress=progress)


def _refuse_a_bomb(source: Path, nbytes: int) -> None:
    """Where tensors overlap one another each is stored whole: a small file can be made to fill a disk that way."""
    folder = source if source.is_dir() else source.parent
    files = [source, *folder.iterdir()] if source.is_dir() or source.suffix == ".json" else [source]
    there = sum(path.stat().st_size for path in files if path.is_file())
    if nbytes > max(_ANYHOW, _SWELLS * there):
        raise FormatError(
            f"{source} has {there} bytes and would be a step of {nbytes}: tensors in it overlap one another",
            hint="if that is right, load it with torch and save it by a Checkpointer",
        )


def format_of(source: Path, options: ImportOptions) -> ImportFormat:
    """What kind of checkpoint lies there. FormatError for a folder that looks like none."""
    if options.format is not None:
        return options.format
    if source.is_dir():
        if (source / METADATA).exists():
            return "dcp"
        index = index_in(source)
        if index is not None and index.name in (INDEX, "model.safetensors"):
            return "huggingface"
        if any(path.suffix == ".pt" for ranks in items_in(source).values() for path in ranks.values()):
            return "torch_checkpointing"
        if index is not None:
            return "huggingface"
        raise FormatError(f"{source} is no folder of DCP, Hugging Face or torch_checkpointing")
    if source.name.endswith(".index.json"):
        return "huggingface"
    return "safetensors" if source.suffix == ".safetensors" else "torch"


def _loaded(source: Path, options: ImportOptions, stack: contextlib.ExitStack) -> object:
    match format_of(source, options):
        case "safetensors":
            return read_safetensors(source, stack)
        case "huggingface":
            index = index_in(source) if source.is_dir() else source
            if index is None:
                raise FormatError(f"{source} holds no safetensors files")
            return read_safetensors(index, stack) if index.suffix == ".safetensors" else read_huggingface(index, stack)
        case "dcp":
            return read_dcp(source)
        case "torch":
            return read_torch(source, stack)
        case "torch_checkpointing":
            return read_torch_checkpointing(source, stack, options.key)


def chosen_entry(loaded: object, key: str | None, source: Path) -> object:
    """The entry of that key; all of it where no key is said. ValueError where there is none."""
    if key is None:
        return loaded
    if not isinstance(loaded, dict) or key not in loaded:
        there = ", ".join(map(str, list(loaded)[:20])) if isinstance(loaded, dict) else f"a {type(loaded).__name__}"
        raise ValueError(f"{source} has no {key!r}; it holds {there}")
    return cast("object", loaded[key])


def store_tensors(
    where: str | os.PathLike[str],
    step: int,
    harvest: Harvest,
    *,
    run: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Commit tensors, read as they are written, as a step; raises as `import_foreign`."""
    layout = layouts.build(
        [Shard.whole(name, one.dtype, one.shape) for name, one in harvest.tensors.items()], harvest.views
    )
    small = harvest.values()
    told = meter(layout.nbytes, progress)

    def write(fd: int, facts: RunFacts) -> Record:
        places = [Place(0, len(layout.header), Plain(layout.header))]
        places += [Place(entry.offset, entry.nbytes, harvest.tensors[entry.name]) for entry in layout.entries]
        sums = pour(fd, places, layout.nbytes, told)
        sums = chunk_sums(sums, layout.nbytes, CHUNK)
        return Record.of(layout, sums, small, run=facts.run, step=step, created=time.time())

    with _for_writing(where, step, layout, run=run, replace=replace) as (target, facts, _):
        if isinstance(target, DiskTier):
            _committed(target, step, lambda: target.put_by(step, 0, layout, lambda fd: write(fd, facts)), replace)
        else:
            _into_store(target, step, layout, harvest, small, facts, replace, told)
    return Imported(str(target.where), step, len(layout.entries), len(layout.views), layout.nbytes)


def store(
    where: str | os.PathLike[str],
    step: int,
    layout: Layout,
    small: Document,
    fill: Callable[[native.Segment, native.Pool], None],
    *,
    run: str | None = None,
    metric: float | None = None,
    replace: bool = False,
) -> Imported:
    """Commit an image as a step. `fill` writes all of it into memory, header too; raises as `import_foreign`."""
    with _for_writing(where, step, layout, run=run, replace=replace) as (target, facts, pool):
        segment = native.Segment("zerostall-import", stride_of(layout))
        try:
            fill(segment, pool)
            _put_memory(target, step, layout, segment, small, facts, replace, metric)
        finally:
            segment.close()
    return Imported(str(target.where), step, len(layout.entries), len(layout.views), layout.nbytes)


def _into_store(
    target: RunTier,
    step: int,
    layout: Layout,
    harvest: Harvest,
    small: Document,
    facts: RunFacts,
    replace: bool,
    told: Callable[[int], None],
) -> None:
    """Stores are given images in memory, so there one is made first."""
    segment = native.Segment("zerostall-import", stride_of(layout))
    try:
        segment.view(0, len(layout.header))[:] = layout.header
        for entry in layout.entries:
            harvest.tensors[entry.name].read_into(segment.view(entry.offset, entry.nbytes), 0)
            told(entry.nbytes)
        _put_memory(target, step, layout, segment, small, facts, replace, None)
    finally:
        segment.close()


def _put_memory(
    target: RunTier,
    step: int,
    layout: Layout,
    segment: native.Segment,
    small: Document,
    facts: RunFacts,
    replace: bool,
    metric: float | None,
) -> None:
    starts = range(0, layout.nbytes, CHUNK)
    sums = [native.crc32c_memory(segment.address + at, min(CHUNK, layout.nbytes - at)) for at in starts]
    record = Record.of(layout, sums, small, run=facts.run, step=step, metric=metric, created=time.time())

    def put() -> Record:
        target.put(Image(layout, record, segment.address))
        return record

    _committed(target, step, put, replace)


@contextlib.contextmanager
def _for_writing(
    where: str | os.PathLike[str], step: int, layout: Layout, *, run: str | None, replace: bool
) -> Iterator[tuple[RunTier, RunFacts, native.Pool]]:
    """A run, for its one writer; made where it is missing."""
    names.step_folder(step)  # ValueError for what is no step
    with _opened(where) as (target, pool):
        if step in target.steps() and not replace:
            raise StepExistsError(
                f"step {step} is in {target.where} already", hint="choose another step, or say replace=True (--replace)"
            )
        yield target, _run_of(target, layout, run), pool


@contextlib.contextmanager
def _opened(where: str | os.PathLike[str]) -> Iterator[tuple[RunTier, native.Pool]]:
    """Where to import to, for this process alone if it is a folder; in a store, one of two writers wins."""
    text = os.fspath(where)
    with contextlib.ExitStack() as stack:
        if is_url(text):
            remote = stack.enter_context(opened_remote(text, config.store_environment()))
            pool = native.Pool("import", _THREADS)
            stack.callback(pool.close)
            yield remote, pool
            return
        folder = real(text)
        if (step := step_here(folder)) is not None:
            raise ValueError(f"{folder} is step {step} of a run: import into the run's folder, {folder.parent}")
        with storage_errors(folder, "the run's folder", 0):
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(FolderLock(folder).close)
        pool = native.Pool("import", _THREADS)
        stack.callback(pool.close)
        yield DiskTier(folder, pool), pool


def _committed(target: RunTier, step: int, put: Callable[[], Record], replace: bool) -> None:
    try:
        record = put()
        facts = manifests.facts(record, manifests.encode_record(record))
        manifest = Manifest(
            run=record.run, step=step, world=1, ranks=(facts,), metric=record.metric, created=record.created
        )
        target.commit(manifest, replace=replace)
    except BaseException:
        target.abandon(step)
        raise


def _run_of(target: RunTier, layout: Layout, name: str | None) -> RunFacts:
    """What run it is; from now on this one, where it was none."""
    facts = target.run_facts()
    if facts is None:
        facts = target.found_run(
            RunFacts(
                run=uuid.uuid4().hex, name=name or "", fingerprint=layouts.fingerprint([layout]), created=time.time()
            )
        )
    if name not in (None, facts.name):
        raise RunMismatchError(f"{target.where} belongs to the run {facts.name!r}, not to {name!r}")
    return facts
