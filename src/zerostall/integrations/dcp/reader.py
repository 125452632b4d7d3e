"""A StorageReader that reads steps of a run, whoever wrote them: each rank what it asks for, every byte checked."""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zerostall.core import steps as names
from zerostall.core.boxes import Box, runs
from zerostall.core.dtypes import DTYPES
from zerostall.flow.pour import THREADS
from zerostall.flow.whole_step import opened_step
from zerostall.integrations.dcp.place import names_a_step, place_of
from zerostall.trainer.exchange.outlines import outline_of
from zerostall.trainer.state import tensors as kinds

if TYPE_CHECKING:
    import os
    from concurrent.futures import Future as Running

    from zerostall.flow.whole_step import WholeStep, WholeTensor
    from zerostall.trainer.exchange.outlines import Outline


class Reader(StorageReader):
    """Reads a step of the run in `where`, a folder or a URL.

    The state may be asked for in any layout, by any number of ranks: each reads the parts of tensors that it needs.
    Names are those of `dcp.save`; of what a `Checkpointer` wrote, `model.<path>`, `optimizer.state.<parameter>.<key>`
    and so on, as `get_state_dict` spells them.

    Args:
        where: the run; None: the folder of the `checkpoint_id`.
        step: which step; None: the number that the `checkpoint_id` ends in, or the newest clean one.

    Raises (from `dcp.load`, within its CheckpointException):
        SnapshotNotFoundError: no such step.
        CorruptError: the step is damaged. What was read until then may be written to the state.
    """

    def __init__(self, where: str | os.PathLike[str] | None = None, step: int | None = None) -> None:
        super().__init__()
        self._where, self._step = where, step
        self._at: tuple[str | os.PathLike[str] | None, int | None] = (where, step)
        self._open = contextlib.ExitStack()
        self._opened: tuple[WholeStep, Outline] | None = None
        self._values: dict[str, object] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        self._at = (self._where, self._step)
        if checkpoint_id is not None:
            self._at = place_of(checkpoint_id, self._where, self._step)

    def read_metadata(self, *args: Any) -> Metadata:
        step, outline = self._look()
        states: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, str] = {}
        for name, tensor in outline.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in step.boxes(tensor)]
            properties = TensorProperties(dtype=kinds.torch_dtype(tensor.dtype))
            states[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            for chunk in chunks:
                places[MetadataIndex(name, chunk.offsets)] = tensor.name
        for name in self._values:
            states[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = name
        meta = StorageMeta(checkpoint_id=str(self.checkpoint_id), load_id=uuid.uuid4().hex)
        return Metadata(states, planner_data=dict(outline.paths), storage_data=places, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._look()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        step, outline = self._look()
        wanted: list[tuple[ReadItem, WholeTensor]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(self._values[name], stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
            else:
                wanted.append((item, outline.tensors[name]))
        # In the order in which the bytes lie, so that each chunk is read once.
        wanted.sort(key=lambda pair: step.order(pair[1]))
        try:
            self._read(step, wanted, planner)
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str | Path:
        """The folder of the step, or of the run where no step was said."""
        where, step = self._at
        if where is None:
            return ""
        return Path(where) if step is None else Path(where) / names.step_folder(step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return names_a_step(checkpoint_id)

    def close(self) -> None:
        """Close the files. A reader that was closed opens them again."""
        self._opened = None
        self._open.close()

    def _look(self) -> tuple[WholeStep, Outline]:
        if self._opened is None:
            where, step = self._at
            if where is None:
                raise ValueError("say where: Reader('runs/gpt'), or checkpoint_id='runs/gpt/step-100'")
            whole = self._open.enter_context(opened_step(where, step))
            outline = outline_of(whole)
            self._values = outline.values(whole)
            self._opened = whole, outline
        return self._opened

    def _read(self, step: WholeStep, wanted: list[tuple[ReadItem, WholeTensor]], planner: LoadPlanner) -> None:
        """Several at a time; the planner is asked and told on the calling thread."""
        waiting: deque[tuple[Running[None], ReadItem, torch.Tensor, torch.Tensor]] = deque()

        def first_done() -> None:
            running, item, target, landed = waiting.popleft()
            running.result()
            if landed is not target:
                target.copy_(landed)
            planner.commit_tensor(item, target)

        with ThreadPoolExecutor(THREADS, "zerostall-dcp") as threads:
            for item, tensor in wanted:
                target = planner.resolve_tensor(item).detach()
                if tuple(target.shape) != tuple(item.lengths):
                    raise ValueError(f"{tensor.name}: {tuple(item.lengths)} are to be read into {tuple(target.shape)}")
                dtype = kinds.torch_dtype(tensor.dtype)
                straight = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
                landed = target if straight else torch.empty(target.shape, dtype=dtype)
                offset = item.storage_index.offset or (0,) * len(tensor.shape)
                start = tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True))
                box = Box(start, tuple(item.lengths))
                waiting.append((threads.submit(_read_box, step, tensor, box, landed), item, target, landed))
                if len(waiting) > 2 * THREADS:
                    first_done()
            while waiting:
                first_done()


def _read_box(step: WholeStep, tensor: WholeTensor, box: Box, target: torch.Tensor) -> None:
    """Fill a contiguous tensor in host memory with a box of a stored one."""
    nbytes = target.nbytes
    if not nbytes:
        return
    itemsize = DTYPES[tensor.dtype].itemsize
    view = memoryview((ctypes.c_char * nbytes).from_address(target.data_ptr())).cast("B")
    readable = step.readable(tensor)
    at = 0
    for first, count in runs(tensor.shape, box):
        size = count * itemsize
        readable.read_into(view[at : at + size], first * itemsize)
        at += size
    assert at == math.prod(box.shape) * itemsize
