"""What the kernels are made of."""

# What a kernel's types are is for Triton to say.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from zerostall.optim import tables

if TYPE_CHECKING:
    from torch import Tensor

    from zerostall.optim.batches import Kind
    from zerostall.optim.tables import Table

WIDTH = tl.constexpr(tables.WIDTH)
SIZE = tl.constexpr(tables.SIZE)
PARAMETER = tl.constexpr(tables.PARAMETER)
GRADIENT = tl.constexpr(tables.GRADIENT)
KEPT = tl.constexpr(tables.KEPT)
STEP = tl.constexpr(tables.STEP)
MOMENTS = tl.constexpr(tables.MOMENTS)

_TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
OPTIONS: dict[str, object] = {"num_warps": 8, "enable_fp_fusion": True}
_COUNTED = 256


@triton.jit
def double(bits):
    """A float64 that came as the integer with its bits: Triton passes floats as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


# In all of these "else" matters: without it Triton looks at what follows too, and there is no rounded division of
# float64.


@triton.jit
def divide(a, b):
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def root(a):
    if a.dtype == tl.float64:
        return tl.sqrt(a)
    else:
        return tl.sqrt_rn(a)


@triton.jit
def power(a, b, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.exp2(b.to(tl.float64) * tl.log2(a.to(tl.float64))).to(a.dtype)
    else:
        return libdevice.pow(a, b)


@triton.jit
def mine(table, work, tiles, TILE: tl.constexpr):
    """The line of this program's row, its first element, and how many there are from there on."""
    item = tl.load(work + tl.program_id(0))
    line = table + (item >> 32) * WIDTH
    start = (item & 0xFFFFFFFF) * TILE * tiles
    left = tl.minimum(tl.load(line + SIZE) - start, tiles * TILE).to(tl.int32)
    return line, start, left


@triton.jit
def address(line, COLUMN: tl.constexpr, start, TYPE: tl.constexpr):
    """Where element `start` lies of what the column has the address of."""
    return tl.load(line + COLUMN) + start * (TYPE.primitive_bitwidth // 8)


@triton.jit
def load(address, at, left, TYPE: tl.constexpr, OP: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """A tile, of which `left` elements are the tensor's. WHOLE: all, and they lie at a multiple of 16 bytes."""
    offsets = tl.arange(0, TILE)
    pointer = (address + at * (TYPE.primitive_bitwidth // 8)).to(tl.pointer_type(TYPE))
    if WHOLE:
        return tl.load(tl.multiple_of(pointer, 16) + offsets).to(OP)
    else:
        return tl.load(pointer + offsets, mask=offsets < left, other=0.0).to(OP)


@triton.jit
def store(address, at, value, left, TYPE: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    pointer = (address + at * (TYPE.primitive_bitwidth // 8)).to(tl.pointer_type(TYPE))
    if WHOLE:
        tl.store(tl.multiple_of(pointer, 16) + offsets, value.to(TYPE))
    else:
        tl.store(pointer + offsets, value.to(TYPE), mask=offsets < left)


@triton.jit(do_not_specialize=["rows"])
def _count(table, rows, infinite_at, SKIPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    at = tl.load(table + row * WIDTH + STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    by = tl.where(tl.load(infinite_at) == 1, 0.0, 1.0) if SKIPS else 1.0
    tl.store(at, tl.load(at, mask=inside, other=0.0) + by, mask=inside)


def count(table: Table, infinite: Tensor | None) -> None:
    """Add one to every counter of steps; nothing where `infinite` is 1."""
    _count[((table.rows + _COUNTED - 1) // _COUNTED,)](
        table.columns,
        table.rows,
        table.columns if infinite is None else infinite,
        SKIPS=infinite is not None,
        BLOCK=_COUNTED,
        **OPTIONS,
    )


def types(kind: Kind) -> dict[str, object]:
    """Those of parameters, gradients and moments, and that in which is computed."""
    return {
        "P": _TYPES[kind.parameter],
        "G": _TYPES[kind.gradient],
        "M": _TYPES[kind.moment],
        "OP": tl.float64 if kind.parameter == torch.float64 else tl.float32,
    }


def bits(value: float) -> int:
    """The integer with the bits of a float64."""
    return struct.unpack("<q", struct.pack("<d", value))[0]
