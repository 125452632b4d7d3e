"""What stands among the small values for things that are not values: tensors, arrays, other parts.

Importing this module teaches `core.values` these and the value types of torch and numpy.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import sys
import types
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from zerostall.core import values
from zerostall.core.values import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zerostall.trainer.state.tensors import Holder

NAMESPACES = (types.SimpleNamespace, argparse.Namespace)

_INLINE_KINDS = "mMUSbiufc"
_MAX_STATE = 16 << 10


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Stands for the numpy array whose bytes are the entry of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class PartRef:
    """Stands for a part of its own: a module, an optimizer or a like object within a container."""

    name: str


@dataclass(frozen=True, slots=True)
class Composite:
    """Stands for a tensor subclass made of plain tensors.

    Attributes:
        kind: its class, for messages only: a class is never looked up by a name from a file.
        inner: attribute -> ref.
        context: what else its flatten protocol says of it.
    """

    kind: str
    inner: dict[str, object]
    context: object


@dataclass(frozen=True, slots=True)
class SmallTensor:
    """A generator's state, kept as a value."""

    data: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> SmallTensor:
        # `is_generator_state` made sure of contiguous bytes in host memory; numpy need not be there to read them.
        return SmallTensor(ctypes.string_at(tensor.data_ptr(), tensor.numel()))

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8)


Ref: TypeAlias = TensorRef | ArrayRef | Composite


def is_generator_state(tensor: torch.Tensor) -> bool:
    """Return whether a tensor looks like what `Generator.get_state()` returns."""
    return (
        tensor.dtype is torch.uint8
        and tensor.dim() == 1
        and 0 < tensor.numel() <= _MAX_STATE
        and type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
    )


def names_in(tree: object) -> Iterator[str]:
    """Yield the names of the tensors and arrays that a tree of values refers to."""
    if isinstance(tree, (TensorRef, ArrayRef)):
        yield tree.name
    elif isinstance(tree, Composite):
        for ref in tree.inner.values():
            yield from names_in(ref)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from names_in(item)
    elif isinstance(tree, (list, tuple, deque)):
        for item in tree:
            yield from names_in(item)
    elif isinstance(tree, NAMESPACES):
        for item in vars(tree).values():
            yield from names_in(item)


@dataclass(frozen=True, slots=True)
class Resolver:
    """Where `resolve` finds what refs stand for.

    Attributes:
        holder: name -> tensor or array.
        part: name -> what stands for a part of its own.
        outer: name of the first tensor within a tensor subclass -> the subclass's tensor.
    """

    holder: Callable[[str], Holder]
    part: Callable[[str], object] = lambda name: None
    outer: Mapping[str, object] = field(default_factory=dict)


def _array(tensor: torch.Tensor) -> object:
    return None if tensor.is_meta else tensor.cpu().numpy()  # nobody asked for what has no memory


def resolve(tree: object, found: Resolver) -> object:
    """Return a tree with everything in place of its refs. Containers that can be changed are changed in place."""
    if isinstance(tree, TensorRef):
        return found.holder(tree.name)
    if isinstance(tree, ArrayRef):
        holder = found.holder(tree.name)
        return _array(holder) if isinstance(holder, torch.Tensor) else holder
    if isinstance(tree, SmallTensor):
        return tree.tensor()
    if isinstance(tree, PartRef):
        return found.part(tree.name)
    if isinstance(tree, Composite):
        return _resolve_composite(tree, found)
    if type(tree) is tuple:
        return tuple([resolve(item, found) for item in tree])
    if isinstance(tree, dict):
        for key in tree:
            tree[key] = resolve(tree[key], found)
    elif isinstance(tree, (list, deque)):
        for index in range(len(tree)):
            tree[index] = resolve(tree[index], found)
    elif isinstance(tree, NAMESPACES):
        for key, item in vars(tree).items():
            setattr(tree, key, resolve(item, found))
    return tree


def _resolve_composite(composite: Composite, found: Resolver) -> object:
    inner = {attribute: resolve(ref, found) for attribute, ref in composite.inner.items()}
    outer = found.outer.get(next(names_in(composite), ""))
    return inner if outer is None else outer


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError("expected a text")
    return value


def _bytes(value: object) -> bytes:
    if type(value) is not bytes:
        raise TypeError("expected bytes")
    return value


def _read_composite(value: object) -> Composite:
    kind, inner, context = cast("tuple[object, object, object]", value)
    if type(inner) is not dict or not all(type(key) is str for key in inner):
        raise TypeError("expected a dict of attributes")
    return Composite(_text(kind), inner, context)


def _read_dtype(value: object) -> torch.dtype:
    found = getattr(torch, _text(value), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no data type {value!r}")
    return found


def _read_device(value: object) -> torch.device:
    try:
        return torch.device(_text(value))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _read_size(value: object) -> torch.Size:
    if type(value) is not list or not all(type(item) is int for item in value):
        raise TypeError("expected a list of integers")
    return torch.Size(value)


def _read_stream(value: object) -> io.BytesIO:
    return io.BytesIO(_bytes(value))


def _register() -> None:
    values.register(ArrayRef, "zerostall.array", lambda ref: ref.name, lambda value: ArrayRef(_text(value)))
    values.register(PartRef, "zerostall.part", lambda ref: ref.name, lambda value: PartRef(_text(value)))
    values.register(
        Composite,
        "zerostall.composite",
        lambda ref: (ref.kind, ref.inner, ref.context),
        _read_composite,
    )
    values.register(SmallTensor, "torch.state", lambda state: state.data, lambda value: SmallTensor(_bytes(value)))
    values.register(torch.dtype, "torch.dtype", lambda dtype: str(dtype).removeprefix("torch."), _read_dtype)
    values.register(torch.device, "torch.device", str, _read_device)
    values.register(torch.Size, "torch.size", lambda size: list(size), _read_size)
    values.register(io.BytesIO, "python.bytesio", lambda stream: stream.getvalue(), _read_stream)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _register_numpy()


def _register_numpy() -> None:
    import numpy

    def read_scalar(kind: type[numpy.generic]) -> Callable[[object], numpy.generic]:
        def read(value: object) -> numpy.generic:
            return cast("numpy.generic", numpy.frombuffer(_bytes(value), dtype=kind, count=1)[0])

        return read

    def write_array(array: numpy.ndarray) -> object:
        if array.dtype.kind not in _INLINE_KINDS:
            raise ValueError(f"a numpy array of {array.dtype.str}")
        return (array.dtype.str, list(array.shape), array.tobytes())

    def read_array(value: object) -> numpy.ndarray:
        text, shape, data = cast("tuple[object, list[int], object]", value)
        dtype = numpy.dtype(_text(text))
        if dtype.kind not in _INLINE_KINDS or dtype.itemsize == 0:
            raise ValueError(f"a numpy array of {text}")
        return numpy.frombuffer(bytearray(_bytes(data)), dtype=dtype).reshape(shape)

    # Little-endian bytes: the only order that zerostall runs on.
    for kind in ("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        scalar = getattr(numpy, kind)
        values.register(scalar, f"numpy.{kind.rstrip('_')}", lambda value: value.tobytes(), read_scalar(scalar))
    for kind in ("float16", "float32", "float64", "complex64", "complex128"):
        scalar = getattr(numpy, kind)
        values.register(scalar, f"numpy.{kind}", lambda value: value.tobytes(), read_scalar(scalar))
    values.register(numpy.ndarray, "numpy.array", write_array, read_array)


_register()
__all__ = ["ArrayRef", "Composite", "PartRef", "Ref", "SmallTensor", "is_generator_state", "names_in", "resolve"]
