"""Which tensors and arrays can be stored byte for byte, and what is said of the others."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, cast

import msgspec
import torch
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from zerostall.core.boxes import Box
from zerostall.core.dtypes import DTYPES
from zerostall.errors import CapabilityError
from zerostall.trainer.state.flat import FlatShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy


Holder: TypeAlias = "torch.Tensor | numpy.ndarray"
"""What holds bytes: a torch tensor or a numpy array."""

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
"""The name of each data type of this torch that an image can hold."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_DEVICES = frozenset({"cpu", "cuda"})
# Sharding libraries leave an empty tensor in a parameter's place and note the real shape beside it.
_PLACEHOLDER_SHAPES = ("ds_shape", "full_shape", "_full_shape")


class Geometry(msgspec.Struct, frozen=True, gc=False):
    """Where the elements of a tensor lie: all that matters for aliasing and for copying.

    Attributes:
        storage: the memory it belongs to; equal numbers mean the same memory.
        start: address of the first element, in bytes.
        strides: in elements.
    """

    storage: int
    start: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements as the user sees them."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def stop(self) -> int:
        """Address behind the last byte that an element reaches."""
        if 0 in self.shape:
            return self.start
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.start + (reach + 1) * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie row by row with no gap."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def repeats(self) -> bool:
        """Whether a dimension repeats the same elements (stride 0)."""
        return 0 in self.strides and any(
            stride == 0 and size > 1 for size, stride in zip(self.shape, self.strides, strict=True)
        )

    @property
    def overlaps(self) -> bool:
        """Whether several elements share a place in memory, wholly or in part of a dimension."""
        if 0 in self.shape:
            return False
        reach = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride < reach:
                # Seldom: strides that are not nested. Then the places are counted.
                places = torch.arange((self.stop - self.start) // self.itemsize).as_strided(self.shape, self.strides)
                return places.unique().numel() != self.count
            reach += (size - 1) * stride
        return False


def is_array(value: object) -> TypeGuard[numpy.ndarray]:
    """Return whether `value` is a numpy array; does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_holder(value: object) -> TypeGuard[Holder]:
    """Return whether `value` is a tensor, or an array of a type that images can hold or must be refused by name."""
    return isinstance(value, torch.Tensor) or (is_array(value) and value.dtype.kind in "biufcOV")


def device_of(device: str | torch.device, option: str = "device") -> torch.device:
    """The device that a user named. ValueError for a name that torch does not know."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{option}={device!r} is no device such as 'cpu', 'cuda' or 'cuda:1'") from None
    if found.type not in _DEVICES:
        raise ValueError(f"{option}={device!r}: tensors are restored into memory of 'cpu' or 'cuda'")
    return found


def insist_on_device(device: torch.device, option: str = "device") -> None:
    """CapabilityError where this machine, or this build of torch, has no such device."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CapabilityError(
            f"{option}={str(device)!r}: torch sees {torch.cuda.device_count()} CUDA devices here",
            hint="`zerostall doctor` says what this machine can do, and why not",
        )


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's data type of that name; AttributeError where this torch has none."""
    return cast("torch.dtype", getattr(torch, name))


def dtype_name(holder: Holder) -> str | None:
    """Return the name of its data type, or None for one that images cannot hold."""
    if isinstance(holder, torch.Tensor):
        return DTYPE_NAMES.get(holder.dtype)
    return holder.dtype.name if holder.dtype.name in DTYPES and holder.dtype.kind in "biufc" else None


def geometry(holder: Holder) -> Geometry:
    """Describe where the elements of a storable tensor or array lie, of a distributed one those that are here."""
    holder = own(holder)
    if isinstance(holder, torch.Tensor):
        dtype = holder.dtype
        storage = holder.untyped_storage().data_ptr()
        return Geometry(
            storage, holder.data_ptr(), DTYPE_NAMES[dtype], dtype.itemsize, tuple(holder.shape), holder.stride()
        )
    owner: object = holder
    while is_array(getattr(owner, "base", None)):
        owner = owner.base  # type: ignore[attr-defined]
    storage = int(cast("numpy.ndarray", owner).__array_interface__["data"][0])
    start = int(holder.__array_interface__["data"][0])
    size = holder.itemsize
    return Geometry(storage, start, holder.dtype.name, size, holder.shape, tuple(s // size for s in holder.strides))


def ordinary(holder: Holder) -> Geometry | None:
    """Describe an ordinary tensor, which can be stored as it is; None for all that `problem` must be asked about."""
    if type(holder) not in _PLAIN:
        return None
    tensor = cast("torch.Tensor", holder)
    dtype = tensor.dtype
    name = DTYPE_NAMES.get(dtype)  # which no quantized tensor has
    if name is None or tensor.is_nested or tensor.layout is not torch.strided or is_flat(tensor):
        return None
    if tensor.is_conj() or tensor.is_neg() or not (tensor.is_cuda or tensor.is_cpu):
        return None
    shape, storage = tuple(tensor.shape), tensor.untyped_storage()
    if 0 in shape or storage.nbytes() == 0:
        return None
    return Geometry(storage.data_ptr(), tensor.data_ptr(), name, dtype.itemsize, shape, tensor.stride())


def geometries(holders: Iterable[Holder], places: Mapping[int, Geometry]) -> list[Geometry]:
    """Describe each of these; `places` tells what is known of some, by their ids."""
    return [places.get(id(holder)) or geometry(holder) for holder in holders]


FLAT = "is a flat parameter of FSDP: the FullyShardedDataParallel that it belongs to must be given, too, as a module"


def is_flat(tensor: torch.Tensor) -> bool:
    """Return whether it is a flat parameter of FSDP's first version, which holds many."""
    return getattr(tensor, "_is_flat_param", False) is True


@functools.cache
def _is_dtensor(kind: type) -> bool:
    return any(base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed.") for base in kind.__mro__)


def is_distributed(value: object) -> bool:
    """Return whether a value is a distributed tensor: torch's, told by name for importing them is slow, or FSDP1's."""
    kind = type(value)
    return kind is FlatShard or _is_dtensor(kind)


def own(holder: Holder) -> Holder:
    """Return what of a tensor is in this process: of a distributed one its local tensor, else itself."""
    if type(holder) in _PLAIN:
        return holder
    return holder._local_tensor if is_distributed(holder) else holder  # type: ignore[union-attr]


def problem(holder: Holder) -> str | None:
    """Say why this tensor or array cannot be stored byte for byte, or return None where it can."""
    if not isinstance(holder, torch.Tensor):
        return _array_problem(holder)
    kind = type(holder)
    if kind not in _PLAIN:
        if is_distributed(holder):
            return _dtensor_problem(holder)
        if kind.__name__ == "ShardedTensor":
            return "is a ShardedTensor: give the module and the optimizer themselves, not their state dicts"
        if isinstance(holder, UninitializedTensorMixin):
            return "is a lazy parameter that has no data before the first forward"
        if not flattens(holder):
            return f"is a {kind.__module__}.{kind.__qualname__}, a tensor subclass without __tensor_flatten__"
    return FLAT if is_flat(holder) else _memory_problem(holder)


def _dtensor_problem(tensor: torch.Tensor) -> str | None:
    if not isinstance(tensor, FlatShard) and any(
        placement.is_partial()
        for placement in tensor.placements  # type: ignore[attr-defined]
    ):
        return "is a distributed tensor with a Partial placement: its value is a sum that no rank has; redistribute it"
    local = own(tensor)
    if type(local) not in _PLAIN:
        return f"is a distributed tensor made of {type(local).__name__}, which cannot be stored"
    return _memory_problem(cast("torch.Tensor", local))


def _memory_problem(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "is on the meta device: it has no data"
    if tensor.layout is not torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.is_quantized:
        return f"is quantized ({str(tensor.dtype).removeprefix('torch.')})"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.device.type not in _DEVICES:
        return f"is on device {tensor.device}"
    if type(tensor) not in _PLAIN:
        return None
    if tensor.dtype not in DTYPE_NAMES:
        return f"has data type {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazily conjugated or negated view; pass it through .resolve_conj().resolve_neg()"
    if tensor.numel() == 0:
        return _placeholder(tensor)
    if tensor.untyped_storage().nbytes() == 0:
        return f"has shape {tuple(tensor.shape)}, but its memory was freed"
    return None


def _placeholder(tensor: torch.Tensor) -> str | None:
    for attribute in _PLACEHOLDER_SHAPES:
        shape = getattr(tensor, attribute, None)
        if isinstance(shape, (tuple, list)) and 0 not in shape:
            return f"is an empty placeholder of a sharded tensor of shape {tuple(shape)}"
    return None


def _array_problem(array: numpy.ndarray) -> str | None:
    if array.dtype.hasobject:
        return "is a numpy array of Python objects"
    if dtype_name(array) is None or not array.dtype.isnative:
        return f"is a numpy array of {array.dtype.str}"
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return "is a numpy array with negative or uneven strides"
    return None


def flattens(tensor: torch.Tensor) -> bool:
    """Return whether a tensor subclass follows torch's flatten protocol."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def is_plain(holder: Holder) -> bool:
    """Return whether it is one run of elements on each rank, and not made of tensors within it."""
    return type(holder) in _PLAIN or not isinstance(holder, torch.Tensor) or is_distributed(holder)


def on_device(holder: Holder) -> bool:
    """Return whether its memory is a CUDA device's."""
    return isinstance(holder, torch.Tensor) and holder.is_cuda


def part_of(holder: Holder, box: Box) -> Holder:
    """Return the view of a tensor or array that is a box of it; itself where that is all."""
    if tuple(holder.shape) == box.shape:
        return holder
    if not isinstance(holder, torch.Tensor):
        return holder[tuple(slice(begin, stop) for begin, stop in zip(box.start, box.stop, strict=True))]
    view = holder.detach()
    for dim, (begin, size) in enumerate(zip(box.start, box.shape, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, begin, size)
    return view


def distinct(holder: Holder) -> Holder:
    """Return the view of an expanded tensor or array that has each element once."""
    where = geometry(holder)
    shape = tuple(1 if stride == 0 else size for size, stride in zip(where.shape, where.strides, strict=True))
    return part_of(holder, Box.whole(shape))
