"""The Triton kernels: one launch updates any number of tensors, whose addresses stand in a table.

A row of the table is one tensor; the columns say where it is read and where it is written, which is one place unless it
is flipped. `owner` and `first` tell each program which tensor is its own and from which of its blocks on. The order of
operations, and where they are fused, is that of torch 2.13's own fused kernels.

With TRITON_INTERPRET=1 the kernels run on tensors in host memory.
"""

# What a kernel's types are is for Triton to say.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from zerostall.optim.tables import BLOCK, INTERPRETED, Table

if TYPE_CHECKING:
    from torch import Tensor

    from zerostall.optim.batches import Kind

SIZE, PARAMETER, GRADIENT, KEPT, STEP, FIRST_IN, FIRST_OUT, SECOND_IN, SECOND_OUT, MOST_IN, MOST_OUT = (
    tl.constexpr(column) for column in range(11)
)
"""The columns of a table."""

_TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_WARPS = 8


@triton.jit
def _double(bits):
    """A float64 that came as the integer with its bits: Triton passes floats as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _divide(a, b):
    if a.dtype == tl.float64:
        return a / b
    return tl.div_rn(a, b)


@triton.jit
def _root(a):
    if a.dtype == tl.float64:
        return tl.sqrt(a)
    return tl.sqrt_rn(a)


@triton.jit
def _power(a, b, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.exp2(b.to(tl.float64) * tl.log2(a.to(tl.float64))).to(a.dtype)
    return libdevice.pow(a, b)


@triton.jit
def _at(table, rows, row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + COLUMN * rows + row).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointer, offsets, inside, MASKED: tl.constexpr, OP: tl.constexpr):
    if MASKED:
        return tl.load(pointer + offsets, mask=inside, other=0.0).to(OP)
    return tl.load(pointer + offsets).to(OP)


@triton.jit
def _store(pointer, offsets, value, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=inside)
    else:
        tl.store(pointer + offsets, value.to(pointer.dtype.element_ty))


@triton.jit
def _adam_block(
    table, rows, row, offsets, numel, lr, beta1, beta2, eps, decay, correction1, root2, scale, skip,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, OP: tl.constexpr, AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECAYED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    inside = offsets < numel
    p_at = _at(table, rows, row, PARAMETER, P, ALIGNED)
    g_at = _at(table, rows, row, GRADIENT, G, ALIGNED)
    p_old = _load(p_at, offsets, inside, MASKED, OP)
    g_old = _load(g_at, offsets, inside, MASKED, OP)
    m_old = _load(_at(table, rows, row, FIRST_IN, M, ALIGNED), offsets, inside, MASKED, OP)
    v_old = _load(_at(table, rows, row, SECOND_IN, M, ALIGNED), offsets, inside, MASKED, OP)
    if tl.load(table + KEPT * rows + row) != 0:
        _store(_at(table, rows, row, KEPT, P, ALIGNED), offsets, p_old, inside, MASKED)
    p = p_old
    g = g_old
    if SCALED:
        g = _divide(g, scale + tl.zeros_like(g))
        stored = tl.where(skip, g_old, g) if SKIPS else g
        _store(g_at, offsets, stored, inside, MASKED)
    if MAXIMIZE:
        g = -g
    if DECAYED:
        p = tl.fma(tl.zeros_like(p) - lr * decay, p, p)
    m = tl.fma(beta1 + tl.zeros_like(g), m_old, tl.fma(tl.zeros_like(g) - beta1, g, g))
    square = g * g
    v = tl.fma(beta2 + tl.zeros_like(g), v_old, tl.fma(tl.zeros_like(g) - beta2, square, square))
    most = v
    if AMSGRAD:
        most_old = _load(_at(table, rows, row, MOST_IN, M, ALIGNED), offsets, inside, MASKED, OP)
        most = tl.where(most_old < v, v, most_old)
        kept = tl.where(skip, most_old, most) if SKIPS else most
        _store(_at(table, rows, row, MOST_OUT, M, ALIGNED), offsets, kept, inside, MASKED)
    denominator = _divide(_root(most), root2 + tl.zeros_like(most)) + eps
    p = p - _divide(_divide(lr, correction1) * m, denominator)
    if SKIPS:
        p = tl.where(skip, p_old, p)
        m = tl.where(skip, m_old, m)
        v = tl.where(skip, v_old, v)
    _store(p_at, offsets, p, inside, MASKED)
    _store(_at(table, rows, row, FIRST_OUT, M, ALIGNED), offsets, m, inside, MASKED)
    _store(_at(table, rows, row, SECOND_OUT, M, ALIGNED), offsets, v, inside, MASKED)


@triton.jit(do_not_specialize=["rows", "lr_bits", "beta1_bits", "beta2_bits", "eps_bits", "decay_bits"])
def _adam(
    table, rows, owner, first, lr_bits, lr_at, beta1_bits, beta2_bits, eps_bits, decay_bits, scale_at, infinite_at,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, OP: tl.constexpr, AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECAYED: tl.constexpr, LR_AT: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = tl.load(owner + program).to(tl.int64)
    start = tl.load(first + program).to(tl.int64) * BLOCK
    lr = tl.load(lr_at).to(OP) if LR_AT else _double(lr_bits).to(OP)
    beta1 = _double(beta1_bits).to(OP)
    beta2 = _double(beta2_bits).to(OP)
    eps = _double(eps_bits).to(OP)
    decay = _double(decay_bits).to(OP)
    step = tl.load(_at(table, rows, row, STEP, tl.float32, False)).to(OP)
    correction1 = 1 - _power(beta1, step, INTERPRETED)
    root2 = _root(1 - _power(beta2, step, INTERPRETED))
    scale = tl.load(scale_at).to(OP) if SCALED else 1.0
    skip = tl.load(infinite_at) == 1 if SKIPS else False
    numel = tl.load(table + SIZE * rows + row)
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        _adam_block(
            table, rows, row, offsets, numel, lr, beta1, beta2, eps, decay, correction1, root2, scale, skip,
            P, G, M, OP, AMSGRAD, MAXIMIZE, DECAYED, SCALED, SKIPS, ALIGNED, False,
        )  # fmt: skip
    else:
        _adam_block(
            table, rows, row, offsets, numel, lr, beta1, beta2, eps, decay, correction1, root2, scale, skip,
            P, G, M, OP, AMSGRAD, MAXIMIZE, DECAYED, SCALED, SKIPS, ALIGNED, True,
        )  # fmt: skip


def adam(
    table: Table,
    kind: Kind,
    *,
    lr: float,
    lr_at: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    amsgrad: bool,
    maximize: bool,
    scale: Tensor | None,
    infinite: Tensor | None,
) -> None:
    """Adam with decoupled weight decay, for all tensors of a table, as work of the current stream.

    Args:
        lr_at: the rate, in a float32 tensor on the device, in place of `lr`.
        scale: what gradients are to be divided by first, and are left as.
        infinite: where this is 1 nothing changes, but what flips is written all the same.
    """
    if table.programs == 0:
        return
    none = table.columns
    with torch.cuda.device(kind.device) if kind.device.type == "cuda" else contextlib.nullcontext():
        _adam[(table.programs,)](
            table.columns,
            table.rows,
            table.owner,
            table.first,
            _bits(lr),
            none if lr_at is None else lr_at,
            _bits(beta1),
            _bits(beta2),
            _bits(eps),
            _bits(decay),
            none if scale is None else scale,
            none if infinite is None else infinite,
            P=_TYPES[kind.parameter],
            G=_TYPES[kind.gradient],
            M=_TYPES[kind.moment],
            OP=tl.float64 if kind.parameter == torch.float64 else tl.float32,
            AMSGRAD=amsgrad,
            MAXIMIZE=maximize,
            DECAYED=decay != 0,
            LR_AT=lr_at is not None,
            SCALED=scale is not None,
            SKIPS=infinite is not None,
            ALIGNED=table.aligned,
            BLOCK=BLOCK,
            INTERPRETED=INTERPRETED,
            num_warps=_WARPS,
        )


def _bits(value: float) -> int:
    """The integer with the bits of a float64."""
    return struct.unpack("<q", struct.pack("<d", value))[0]
