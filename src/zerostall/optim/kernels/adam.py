"""Adam with decoupled weight decay."""

# What a kernel's types are is for Triton to say.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from zerostall.optim.kernels.parts import (
    GRADIENT,
    KEPT,
    MOMENTS,
    OPTIONS,
    PARAMETER,
    STEP,
    address,
    bits,
    divide,
    double,
    load,
    mine,
    power,
    root,
    store,
    types,
)
from zerostall.optim.tables import INTERPRETED, TILE, Table

if TYPE_CHECKING:
    from torch import Tensor

    from zerostall.optim.batches import Kind


@triton.jit
def _tile(
    p_at, g_at, kept_at, keeps, m_in, m_out, v_in, v_out, most_in, most_out, at, left,
    shrink, beta1, beta2, eps, rate, root2, scale, skip,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, OP: tl.constexpr, AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECAYED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    p_old = load(p_at, at, left, P, OP, TILE, WHOLE)
    g_old = load(g_at, at, left, G, OP, TILE, WHOLE)
    m_old = load(m_in, at, left, M, OP, TILE, WHOLE)
    v_old = load(v_in, at, left, M, OP, TILE, WHOLE)
    if keeps:
        store(kept_at, at, p_old, left, P, TILE, WHOLE)
    p = p_old
    g = g_old
    if SCALED:
        g = divide(g, scale + tl.zeros_like(g))
        store(g_at, at, tl.where(skip, g_old, g) if SKIPS else g, left, G, TILE, WHOLE)
    if MAXIMIZE:
        g = -g
    if DECAYED:
        p = tl.fma(tl.zeros_like(p) - shrink, p, p)
    m = tl.fma(beta1 + tl.zeros_like(g), m_old, tl.fma(tl.zeros_like(g) - beta1, g, g))
    square = g * g
    v = tl.fma(beta2 + tl.zeros_like(g), v_old, tl.fma(tl.zeros_like(g) - beta2, square, square))
    most = v
    if AMSGRAD:
        most_old = load(most_in, at, left, M, OP, TILE, WHOLE)
        most = tl.where(most_old < v, v, most_old)
        store(most_out, at, tl.where(skip, most_old, most) if SKIPS else most, left, M, TILE, WHOLE)
    denominator = divide(root(most), root2 + tl.zeros_like(most)) + eps
    p = p - divide(rate * m, denominator)
    if SKIPS:
        p = tl.where(skip, p_old, p)
        m = tl.where(skip, m_old, m)
        v = tl.where(skip, v_old, v)
    store(p_at, at, p, left, P, TILE, WHOLE)
    store(m_out, at, m, left, M, TILE, WHOLE)
    store(v_out, at, v, left, M, TILE, WHOLE)


@triton.jit(do_not_specialize=["tiles", "lr_bits", "beta1_bits", "beta2_bits", "eps_bits", "decay_bits"])
def _adam(
    table, work, tiles, lr_bits, lr_at, beta1_bits, beta2_bits, eps_bits, decay_bits, scale_at, infinite_at,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, OP: tl.constexpr, AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECAYED: tl.constexpr, LR_AT: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    TILE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    line, start, left = mine(table, work, tiles, TILE)
    p_at = address(line, PARAMETER, start, P)
    g_at = address(line, GRADIENT, start, G)
    keeps = tl.load(line + KEPT) != 0
    kept_at = address(line, KEPT, start, P)
    m_in = address(line, MOMENTS, start, M)
    m_out = address(line, MOMENTS + 1, start, M)
    v_in = address(line, MOMENTS + 2, start, M)
    v_out = address(line, MOMENTS + 3, start, M)
    most_in = address(line, MOMENTS + 4, start, M)
    most_out = address(line, MOMENTS + 5, start, M)
    lr = tl.load(lr_at).to(OP) if LR_AT else double(lr_bits).to(OP)
    beta1 = double(beta1_bits).to(OP)
    beta2 = double(beta2_bits).to(OP)
    eps = double(eps_bits).to(OP)
    shrink = lr * double(decay_bits).to(OP)
    step = tl.load(tl.load(line + STEP).to(tl.pointer_type(tl.float32))).to(OP)
    rate = divide(lr, 1 - power(beta1, step, INTERPRETED))
    root2 = root(1 - power(beta2, step, INTERPRETED))
    scale = tl.load(scale_at).to(OP) if SCALED else 1.0
    skip = tl.load(infinite_at) == 1 if SKIPS else False
    odd = (p_at | g_at | kept_at | m_in | m_out | v_in | v_out | most_in | most_out) & 15
    whole = tl.where(odd == 0, left // TILE, 0)
    for tile in range(whole):
        _tile(
            p_at, g_at, kept_at, keeps, m_in, m_out, v_in, v_out, most_in, most_out, tile * TILE, left,
            shrink, beta1, beta2, eps, rate, root2, scale, skip,
            P, G, M, OP, AMSGRAD, MAXIMIZE, DECAYED, SCALED, SKIPS, TILE, True,
        )  # fmt: skip
    for tile in range(whole, (left + TILE - 1) // TILE):
        _tile(
            p_at, g_at, kept_at, keeps, m_in, m_out, v_in, v_out, most_in, most_out, tile * TILE, left - tile * TILE,
            shrink, beta1, beta2, eps, rate, root2, scale, skip,
            P, G, M, OP, AMSGRAD, MAXIMIZE, DECAYED, SCALED, SKIPS, TILE, False,
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
    """Update all tensors of a table, as work of the current stream of the current device.

    Args:
        lr_at: the rate, in a float32 tensor on the device, in place of `lr`.
        scale: what gradients are to be divided by first, and are left as.
        infinite: where this is 1 nothing changes, but what flips is written all the same.
    """
    none = table.columns
    _adam[(table.programs,)](
        table.columns,
        table.work,
        table.tiles,
        bits(lr),
        none if lr_at is None else lr_at,
        bits(beta1),
        bits(beta2),
        bits(eps),
        bits(decay),
        none if scale is None else scale,
        none if infinite is None else infinite,
        **types(kind),
        AMSGRAD=amsgrad,
        MAXIMIZE=maximize,
        DECAYED=decay != 0,
        LR_AT=lr_at is not None,
        SCALED=scale is not None,
        SKIPS=infinite is not None,
        TILE=TILE,
        INTERPRETED=INTERPRETED,
        **OPTIONS,
    )
