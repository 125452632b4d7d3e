"""A step as a folder of torch.distributed.checkpoint, written by DCP's own writer, tensor by tensor."""

from __future__ import annotations

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from zerostall.core.dtypes import DTYPES
from zerostall.errors import StorageError, ZerostallError
from zerostall.flow.export import Exported, chosen, meter, refuse_inside
from zerostall.flow.foreign_dcp import METADATA
from zerostall.flow.new_folder import moved_in
from zerostall.flow.pour import THREADS
from zerostall.flow.readable import Cast
from zerostall.trainer.exchange.casting import convert
from zerostall.trainer.exchange.export_pt import Plain, read
from zerostall.trainer.exchange.outlines import outline_of
from zerostall.trainer.state import tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path
    from typing import Self

    from zerostall.core.exchange import ExportOptions
    from zerostall.flow.catalog import Progress
    from zerostall.flow.readable import Readable
    from zerostall.flow.whole_step import WholeStep

_PART = 64 << 20
"""Bytes of a tensor that are written as one part, which is how much of it is in memory at a time."""


def export_dcp(step: WholeStep, out: Path, options: ExportOptions, progress: Progress | None = None) -> Exported:
    """Write a step as a folder that `dcp.load` and `dcp_to_torch_save` read.

    Where names are neither chosen nor changed, all that was saved, nested as `Checkpointer` was given it. Else the
    tensors alone, flat. Large tensors are written in parts, of which some are read, checked and cast by other threads
    while one is written; so memory is some parts of 64 MiB. The folder is there whole or not at all.

    Raises:
        as `flow.export.export_safetensors`.
    """
    refuse_inside(step, out)
    if options.only is not None or options.rename or options.weights:
        found = chosen(step, options, convert)
        pieces = {**found.pieces, **{alias: found.pieces[name] for alias, name in found.aliases.items()}}
        values: dict[str, object] = {}
        paths: dict[str, tuple[str | int, ...]] = {name: (name,) for name in pieces}
    else:
        outline = outline_of(step, options.root)
        pieces = {name: _cast(step.readable(whole, name), options) for name, whole in outline.tensors.items()}
        plain = Plain(options)
        values = {name: plain.of(value) for name, value in outline.values(step).items()}
        paths = outline.paths
    total = sum(piece.nbytes for piece in pieces.values())
    with (
        _Planner(pieces, values, paths, meter(total, progress)) as planner,
        moved_in(out, overwrite=options.overwrite, nbytes=total, ours=_is_of_dcp, last=METADATA) as folder,
    ):
        # It writes on one thread: what fails on another of its threads is lost. The planner reads ahead on several.
        writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0, sync_files=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there are no other ranks
                save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _cause(error, out) from error
    files = list(out.iterdir())
    nbytes = sum(path.stat().st_size for path in files)
    return Exported(str(out.absolute()), step.step, len(pieces), {}, nbytes, len(files))


def _cast(piece: Readable, options: ExportOptions) -> Readable:
    dtype = options.cast(piece.dtype)
    return piece if dtype == piece.dtype else Cast(piece, dtype, convert)


def _is_of_dcp(name: str) -> bool:
    return name == METADATA or name.endswith(".distcp")


def _cause(error: CheckpointException, out: Path) -> BaseException:
    """What went wrong, out of what DCP makes of it."""
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, ZerostallError):
        return cause
    deeper: BaseException | None = cause  # torch's writer says of a disk that refuses where in its file it is not
    while deeper is not None and not isinstance(deeper, OSError):
        deeper = deeper.__cause__ or deeper.__context__
    if isinstance(deeper, OSError):
        return StorageError(f"cannot write {out}: {deeper.strerror or deeper}", errno=deeper.errno)
    return StorageError(f"cannot write {out}: {cause}") if isinstance(cause, RuntimeError) else cause


class _Planner(DefaultSavePlanner):
    """Plans parts of tensors that are read when their turn comes, or a little before."""

    def __init__(
        self,
        pieces: dict[str, Readable],
        values: dict[str, object],
        paths: dict[str, tuple[str | int, ...]],
        told: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._pieces = pieces
        self._values = values
        self._paths = paths
        self._told = told
        self._parts: list[tuple[WriteItem, Readable]] = []
        self._turns: dict[MetadataIndex, int] = {}
        self._reading: dict[int, Future[torch.Tensor]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "zerostall-export")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._reading.clear()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({}, storage_meta, is_coordinator)
        self.mappings = dict(self._paths)

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._values]
        self._parts = [(item, piece) for name, piece in self._pieces.items() for item in _items(name, piece)]
        self._turns = {item.index: turn for turn, (item, _) in enumerate(self._parts)}
        self.plan = SavePlan(items + [item for item, _ in self._parts], planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._values:
            return self._values[index.fqn]
        turn = self._turns[index]
        for ahead in range(turn, min(turn + 1 + THREADS, len(self._parts))):
            if ahead not in self._reading:
                self._reading[ahead] = self._threads.submit(_read, *self._parts[ahead])
        tensor = self._reading.pop(turn).result()
        self._told(tensor.nbytes)
        return tensor


def _read(part: WriteItem, piece: Readable) -> torch.Tensor:
    assert part.tensor_data is not None
    return read(_Rows(piece, part.tensor_data.chunk))


class _Rows:
    """Some rows of a tensor, as a tensor."""

    def __init__(self, piece: Readable, chunk: ChunkStorageMetadata) -> None:
        self.name, self.dtype, self.shape = piece.name, piece.dtype, tuple(chunk.sizes)
        self._piece = piece
        row = math.prod(piece.shape[1:]) * DTYPES[piece.dtype].itemsize
        self._first = chunk.offsets[0] * row if chunk.offsets else 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read_into(self, view: memoryview, offset: int) -> None:
        self._piece.read_into(view, self._first + offset)


def _items(name: str, piece: Readable) -> list[WriteItem]:
    """The parts of a tensor: as many rows in each as fit, at least one."""
    size = torch.Size(piece.shape)
    properties = TensorProperties(dtype=tensors.torch_dtype(piece.dtype))
    rows = piece.shape[0] if piece.shape else 1
    each = max(1, rows * _PART // max(piece.nbytes, 1)) if piece.nbytes > _PART and piece.shape else max(rows, 1)
    kind = WriteItemType.TENSOR if each >= rows else WriteItemType.SHARD
    found: list[WriteItem] = []
    for first in range(0, max(rows, 1), each):
        start = torch.Size((first, *(0 for _ in piece.shape[1:]))) if piece.shape else torch.Size(())
        shape = torch.Size((min(each, rows - first), *piece.shape[1:])) if piece.shape else size
        data = TensorWriteData(ChunkStorageMetadata(start, shape), properties, size)
        found.append(WriteItem(MetadataIndex(name, start), kind, tensor_data=data))
    return found
