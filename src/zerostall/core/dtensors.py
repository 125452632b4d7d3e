"""What a pickled DTensor says of how it is dealt out: its whole shape, and which boxes of it the file's rank has.

Only inert records are read, as `core.pickles` leaves them; any number in them may be a lie.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from zerostall.core.cuts import Cut, Held, held
from zerostall.core.inert import Made
from zerostall.core.safetensors import MAX_BYTES, MAX_RANK
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from zerostall.core.boxes import Box
    from zerostall.core.inert import Name

_PLACEMENTS = "torch.distributed.tensor.placement_types"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_LAYOUT = "torch.distributed._mesh_layout"
NAMES: frozenset[Name] = frozenset(
    {
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed.device_mesh", "DeviceMesh"),
        *((_PLACEMENTS, name) for name in ("Shard", "Replicate", "_StridedShard")),
        *((_SPEC, name) for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
        *((_LAYOUT, name) for name in ("_MeshLayout", "_FlatLayout")),
    }
)
"""The classes whose records a DTensor consists of."""

_MOST = 1 << 16  # ranks along a dimension, strips, and boxes: no file makes us count for ever


def read(spec: object) -> tuple[tuple[int, ...], Held | None]:
    """Return the shape of the whole tensor and what the rank has of it; None where it is not in the mesh.

    Raises:
        FormatError: it is no such record, or dealt out in a way that is unknown here.
    """
    mesh, meta = _made(_field(spec, "mesh"), "DeviceMesh"), _made(_field(spec, "tensor_meta"), "TensorMeta")
    shape = integers(meta.args[0] if meta.args else meta.field("shape"), MAX_BYTES)
    sizes = _sizes_of(mesh)
    if mesh.field("_coordinate_on_dim") is None:
        return shape, None
    at = integers(mesh.field("_coordinate_on_dim"), _MOST)
    placements = _field(spec, "placements")
    if type(placements) not in (tuple, list) or not len(cast("list[object]", placements)) == len(sizes) == len(at):
        raise FormatError("its mesh and its placements do not go together")
    _insist_on_order(_field(spec, "shard_order"))
    cuts: list[Cut] = []
    indexes: list[int] = []
    for placement, size, index in zip(cast("list[object]", placements), sizes, at, strict=True):
        if index >= size:
            raise FormatError("its rank is not in its mesh")
        cut = _cut(placement, size, len(shape))
        if cut is not None:
            cuts.append(cut)
            indexes.append(index)
    if math.prod(cut.strips for cut in cuts) * max((cut.parts for cut in cuts), default=1) > _MOST:
        raise FormatError("it is cut into too many strips")
    found = held(shape, cuts, indexes)
    if not isinstance(found, Held) or math.prod(map(len, found.spans)) > _MOST:
        raise FormatError("it is cut into too many boxes")
    return shape, found


def whole(shape: tuple[int, ...], boxes: list[tuple[Box, Box]]) -> bool:
    """Whether that is all of it, in one box."""
    return len(boxes) == 1 and boxes[0][0].shape == shape


def integers(value: object, most: int) -> tuple[int, ...]:
    """Return a shape, however it is spelled. FormatError for anything else."""
    if type(value) is Made and value.name == ("torch", "Size") and value.args:
        value = value.args[0]
    if type(value) not in (tuple, list) or len(cast("list[object]", value)) > MAX_RANK:
        raise FormatError("a shape in it is none")
    found = tuple(cast("list[object]", value))
    if not all(type(number) is int and 0 <= number <= most for number in found):
        raise FormatError("a shape in it is none")
    return cast("tuple[int, ...]", found)


def _field(record: object, name: str) -> object:
    return record.field(name) if type(record) is Made else None


def _made(value: object, name: str) -> Made:
    if type(value) is not Made or value.name[1] != name:
        raise FormatError(f"what should be a {name} is none")
    return value


def _sizes_of(mesh: Made) -> tuple[int, ...]:
    """How many ranks there are along each dimension of a mesh, as one version of torch after the other has said it."""
    layout = mesh.field("_layout")
    axes = _field(layout, "axes")
    if type(axes) in (tuple, list) and len(cast("list[object]", axes)) <= MAX_RANK:
        return tuple(_flat(_field(axis, "shape")) for axis in cast("list[object]", axes))
    if (shape := _field(layout, "shape")) is not None:
        return tuple(map(_flat, cast("tuple[object, ...]", shape))) if type(shape) is tuple else (_flat(shape),)
    ranks = _made(mesh.field("mesh"), "_rebuild_tensor_v2")
    return integers(ranks.args[2] if len(ranks.args) > 2 else None, _MOST)


def _flat(shape: object) -> int:
    """How many there are along an axis that may be made of several."""
    sizes = integers((shape,) if type(shape) is int else shape, _MOST)
    if not 1 <= math.prod(sizes) <= _MOST:
        raise FormatError("its mesh is none")
    return math.prod(sizes)


def _cut(placement: object, size: int, dims: int) -> Cut | None:
    """What a dimension of a mesh of that size does; None for nothing."""
    if type(placement) is not Made or placement.name[0] != _PLACEMENTS:
        raise FormatError("a placement of it is unknown")
    kind = placement.name[1]
    if kind == "Replicate" or (size == 1 and kind in ("Shard", "_StridedShard")):
        return None
    dim = placement.args[0] if placement.args else placement.field("dim")
    strips = placement.field("split_factor") if kind == "_StridedShard" else 1
    if strips is None and len(placement.args) > 1:
        strips = placement.args[1]
    if type(dim) is not int or not -dims <= dim < dims or type(strips) is not int or not 1 <= strips <= _MOST:
        raise FormatError(f"a placement of it ({kind}) is none")
    return Cut(dim % dims, size, strips)


def _insist_on_order(order: object) -> None:
    """Dimensions of a mesh cut one after the other, in their order; torch knows others."""
    if order is None:
        return
    for entry in cast("tuple[object, ...]", order) if type(order) is tuple else (order,):
        dims = _made(entry, "ShardOrderEntry").args[1:]
        numbers = integers(dims[0] if dims else None, _MOST)
        if list(numbers) != sorted(numbers):
            raise FormatError("it is dealt out over its mesh in another order than that of the mesh's dimensions")
