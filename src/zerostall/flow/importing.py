"""Other people's files as a step of a run: laid out as one image, checked, committed.

A tensor `layers.0.weight` of a file becomes `model.layers.0.weight`, as a module given as `model=` would be saved, so
that `restore(only="model.*")` finds it.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zerostall import config, native
from zerostall.core import checksum, safetensors, values
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core import names as paths
from zerostall.core import steps as names
from zerostall.core.dtypes import DTYPES
from zerostall.core.layout import CHUNK, Layout, Shard, View
from zerostall.core.manifest import Manifest, Record, RunFacts
from zerostall.errors import FormatError, RunMismatchError, SnapshotNotFoundError, StepExistsError
from zerostall.flow.catalog import opened_remote
from zerostall.flow.export import DTYPES_KEY
from zerostall.flow.folder_lock import FolderLock
from zerostall.flow.image_reader import read_exactly, read_header
from zerostall.tiers.contract import Image
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.files import opened, storage_errors
from zerostall.tiers.host import stride_of
from zerostall.tiers.store import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zerostall.core.values import Document
    from zerostall.flow.catalog import Progress
    from zerostall.tiers.contract import RunTier

_THREADS = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor to store: its full name, and who writes its bytes (row by row) into the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """What was stored: where, as which step, how many tensors, how many bytes."""

    where: str
    step: int
    tensors: int
    aliases: int
    nbytes: int


def import_safetensors(
    source: str | os.PathLike[str],
    where: str | os.PathLike[str],
    step: int,
    *,
    root: str = "model",
    run: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Store a safetensors file, whoever wrote it, as a step of the run in `where`.

    Aliases that the file notes in its metadata become aliases again. Memory: the size of the file.

    Args:
        root: the name that goes before every tensor's. Empty: the names are whole ones already, root and all.
        run: a name for the run, as `Checkpointer(run=...)` gives it.

    Raises:
        SnapshotNotFoundError: there is no such file.
        FormatError: it is none, or damaged.
        StepExistsError: the step is there, and `replace` was not said.
        RunMismatchError: the folder belongs to a run of another name.
        RunBusyError: an agent or another import writes to the folder.
        StorageError, CapacityError: disk or memory ran short.
    """
    path = Path(source).resolve()
    try:
        with opened(path) as fd:
            raw, size = read_header(fd, path)
            header = _decoded(raw, size, path)
            types = _true_types(header, path)
            pieces = [
                _piece(full_name(tensor.name, root), tensor, types.get(tensor.name, ""), fd, path)
                for tensor in header.tensors
            ]
            views = _aliases(header, pieces, root)
            layout = layouts.build([Shard.whole(piece.name, piece.dtype, piece.shape) for piece in pieces], views)

            def fill(segment: native.Segment, pool: native.Pool) -> None:
                _fill(segment.view(0, layout.nbytes), layout, {piece.name: piece for piece in pieces}, progress)

            return store(where, step, layout, module_values(pieces), fill, run=run, replace=replace)
    except FileNotFoundError as error:
        if isinstance(error, SnapshotNotFoundError):
            raise
        raise SnapshotNotFoundError(f"{path} does not exist") from None


def full_name(name: str, root: str) -> str:
    """The name of a tensor that a module's state_dict() would call `name`. FormatError for one that cannot be."""
    if root:
        return paths.join((*paths.split(root), *name.split(".")))
    try:
        paths.split(name)
    except FormatError as error:
        raise FormatError(f"without a root, names must be whole paths: {error}", hint="give a root") from None
    return name


def module_values(pieces: Sequence[Piece]) -> Document:
    """The small values of a state that is nothing but modules, one for each root."""
    roots = dict.fromkeys(str(paths.split(piece.name)[0]) for piece in pieces)
    return values.encode({"parts": {root: ("module", {}) for root in roots}, "rng": None})


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
    """Commit an image as a step. `fill` writes all of it, header and tensors; raises as `import_safetensors`."""
    names.step_folder(step)  # ValueError for what is no step
    with _opened(where) as target:
        if step in target.steps() and not replace:
            raise StepExistsError(
                f"step {step} is in {target.where} already", hint="choose another step, or replace it"
            )
        facts = _run_of(target, layout, run)
        pool = native.Pool("import", _THREADS)
        segment = native.Segment("zerostall-import", stride_of(layout))
        try:
            fill(segment, pool)
            record = _record(segment, layout, small, facts, step, metric)
            _commit(target, Image(layout, record, segment.address), replace)
        finally:
            segment.close()
            pool.close()
    return Imported(str(target.where), step, len(layout.entries), len(layout.views), layout.nbytes)


@contextlib.contextmanager
def _opened(where: str | os.PathLike[str]) -> Iterator[RunTier]:
    """Where to import to, for this process alone if it is a folder; in a store, one of two writers wins."""
    text = os.fspath(where)
    if is_url(text):
        with opened_remote(text, config.store_environment()) as remote:
            yield remote
        return
    folder = Path(text).resolve()
    with storage_errors(folder, "the run's folder", 0):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    pool = native.Pool("import", _THREADS)
    try:
        yield DiskTier(folder, pool)
    finally:
        pool.close()
        lock.close()


def _fill(image: memoryview, layout: Layout, pieces: Mapping[str, Piece], progress: Progress | None) -> None:
    image[: len(layout.header)] = layout.header
    for entry in layout.entries:
        pieces[entry.name].fill(image[entry.offset : entry.offset + entry.nbytes])
        if progress is not None:
            progress(entry.offset + entry.nbytes, layout.nbytes)


def _record(
    segment: native.Segment, layout: Layout, small: Document, run: RunFacts, step: int, metric: float | None
) -> Record:
    starts = range(0, layout.nbytes, CHUNK)
    checksums = [native.crc32c_memory(segment.address + start, min(CHUNK, layout.nbytes - start)) for start in starts]
    return Record(
        run=run.run,
        step=step,
        rank=0,
        world=1,
        layout=layout.digest,
        nbytes=layout.nbytes,
        chunk_bytes=CHUNK,
        checksums=checksums,
        checksum=checksum.whole(checksums, layout.nbytes, CHUNK),
        values=small,
        metric=metric,
        created=time.time(),
    )


def _commit(target: RunTier, image: Image, replace: bool) -> None:
    record = image.record
    facts = manifests.facts(record, manifests.encode_record(record))
    manifest = Manifest(
        run=record.run, step=record.step, world=1, ranks=(facts,), metric=record.metric, created=record.created
    )
    try:
        target.put(image)
        target.commit(manifest, replace=replace)
    except BaseException:
        target.abandon(record.step)
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


# ------------------------------------------------------------------------------------------- safetensors files


def _decoded(raw: bytes, size: int, path: Path) -> safetensors.Header:
    try:
        return safetensors.decode(raw, size)
    except FormatError as error:
        raise type(error)(f"{path}: {error.args[0]}", hint=error.hint) from None


def _true_types(header: safetensors.Header, path: Path) -> dict[str, str]:
    """Name → true type, for the tensors that our own export had to write under another type's code."""
    text = header.metadata.get(DTYPES_KEY, "{}")
    try:
        types = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{path}: the metadata {DTYPES_KEY} cannot be read: {error}") from None
    for tensor in header.tensors:
        true = DTYPES.get(types.get(tensor.name, tensor.dtype))
        if true is None or true.name == tensor.dtype:
            continue
        behind = tensor.shape[len(tensor.shape) - len(true.trailing) :]
        if true.code != DTYPES[tensor.dtype].code or behind != true.trailing:
            raise FormatError(f"{path}: tensor {tensor.name!r} cannot be of type {true.name}")
    return {name: true for name, true in types.items() if true in DTYPES}


def _piece(name: str, tensor: safetensors.Tensor, true: str, fd: int, path: Path) -> Piece:
    def fill(target: memoryview) -> None:
        read_exactly(fd, target, tensor.offset, path)

    dtype = DTYPES[true or tensor.dtype]
    shape = tensor.shape
    if dtype.name != tensor.dtype and dtype.trailing:
        shape = shape[: len(shape) - len(dtype.trailing)]
    return Piece(name, dtype.name, shape, fill)


def _aliases(header: safetensors.Header, pieces: Sequence[Piece], root: str) -> list[View]:
    """Names that the metadata notes as another name of a tensor in the file."""
    known = {tensor.name: piece for tensor, piece in zip(header.tensors, pieces, strict=True)}
    return [
        twin(full_name(alias, root), known[base])
        for alias, base in header.metadata.items()
        if base in known and alias not in known
    ]


def twin(name: str, piece: Piece) -> View:
    """Another name for all of a piece."""
    strides: list[int] = []
    step = 1
    for size in reversed(piece.shape):
        strides.append(step)
        step *= max(size, 1)
    return View(name, piece.name, piece.dtype, piece.shape, tuple(reversed(strides)), 0)
