"""What one rank stores of a save: boxes of tensors, and small values on their way to the first rank's record."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from zerostall.core import values
from zerostall.core.inert import Global, Made
from zerostall.core.layout import Shard
from zerostall.core.shards import tile_name
from zerostall.core.values import Document, TensorRef
from zerostall.errors import FormatError, StateError
from zerostall.flow.readable import Assembled, Plain
from zerostall.flow.torch_archive import Loose, read_archive
from zerostall.trainer.exchange.casting import inert
from zerostall.trainer.exchange.export_pt import read
from zerostall.trainer.state import tensors as kinds

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

_TRANSFORM = DefaultSavePlanner.transform_object


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the coordinator tells each rank of a save.

    Attributes:
        folder: where the images go until the step is committed.
        names: flat name → the tensor's name in the step.
    """

    run: str
    step: int
    rank: int
    world: int
    created: float
    folder: str
    names: dict[str, str]


class Holdings:
    """Attributes:
    shards, tensors: by name.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self.shards: list[Shard] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def tensor(self, item: WriteItem, tensor: torch.Tensor) -> int:
        data = item.tensor_data
        assert data is not None
        tensor = tensor.detach()
        dtype = kinds.DTYPE_NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided or tensor.is_quantized:
            raise StateError(f"{item.index.fqn}: a tensor of {tensor.dtype}, {tensor.layout} cannot be stored")
        if tuple(tensor.shape) != tuple(data.chunk.sizes):
            raise StateError(f"{item.index.fqn}: a planner made {tuple(tensor.shape)} of {tuple(data.chunk.sizes)}")
        name, start = self._ticket.names[item.index.fqn], tuple(data.chunk.offsets)
        if name in self.tensors:  # another box of one that is here already
            name = next(tiled for number in count(1) if (tiled := tile_name(name, number)) not in self.tensors)
        self.shards.append(Shard(name, dtype, tuple(tensor.shape), tuple(data.size), start))
        self.tensors[name] = tensor.resolve_conj().resolve_neg()
        return tensor.nbytes

    def value(self, item: WriteItem, planner: SavePlanner) -> Document:
        """A small value, typed. DCP would keep the bytes that torch.save makes of it: pickles are not kept here."""
        name = self._ticket.names[item.index.fqn]
        return values.encode(self._tree(name, _object(item, planner)), item.index.fqn)

    def _tree(self, name: str, value: object) -> object:
        """A copy of containers, with refs in place of tensors."""
        if isinstance(value, torch.Tensor):
            return self._inner(name, value)
        if isinstance(value, Loose):
            return self._inner(name, read(Assembled(name, value.dtype, value.shape, value.tiles, value.sources)))
        if isinstance(value, (Made, Global)):
            return inert(value)
        if isinstance(value, dict):
            made = copy.copy(value)
            for number, (key, item) in enumerate(value.items()):
                made[key] = self._tree(f"{name}[{number}]", item)
            return made
        if type(value) in (list, tuple):
            items = [self._tree(f"{name}[{number}]", item) for number, item in enumerate(cast("list[object]", value))]
            return items if type(value) is list else tuple(items)
        return value

    def _inner(self, name: str, tensor: torch.Tensor) -> TensorRef:
        """A tensor among values is stored beside them."""
        tensor = tensor.detach()
        dtype = kinds.DTYPE_NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided:
            raise StateError(f"{name}: a tensor of {tensor.dtype}, {tensor.layout} cannot be stored")
        self.shards.append(Shard.whole(name, dtype, tuple(tensor.shape)))
        self.tensors[name] = tensor
        return TensorRef(name)


def _object(item: WriteItem, planner: SavePlanner) -> object:
    if isinstance(planner, DefaultSavePlanner) and type(planner).transform_object is _TRANSFORM:
        return planner.lookup_object(item.index)
    data = cast("io.BytesIO", planner.resolve_data(item)).getvalue()
    try:
        return read_archive(Plain(data), 0, len(data), item.index.fqn)
    except FormatError as error:
        raise StateError(
            f"{item.index.fqn} cannot be stored without pickle: {error.args[0]}",
            hint="hand over plain values: numbers, texts, lists, dicts and tensors",
        ) from None
