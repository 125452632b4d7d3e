"""Stochastic gradient descent with momentum."""

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
    address,
    bits,
    divide,
    double,
    load,
    mine,
    store,
    types,
)
from zerostall.optim.tables import TILE, Table

if TYPE_CHECKING:
    from torch import Tensor

    from zerostall.optim.batches import Kind


@triton.jit
def _tile(
    p_at, g_at, kept_at, keeps, m_in, m_out, at, left, lr, momentum, weight, decay, scale, skip,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, OP: tl.constexpr, NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECAYED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    p_old = load(p_at, at, left, P, OP, TILE, WHOLE)
    g_old = load(g_at, at, left, G, OP, TILE, WHOLE)
    m_old = load(m_in, at, left, M, OP, TILE, WHOLE)
    if keeps:
        store(kept_at, at, p_old, left, P, TILE, WHOLE)
    g = g_old
    if SCALED:
        g = divide(g, scale + tl.zeros_like(g))
        store(g_at, at, tl.where(skip, g_old, g) if SKIPS else g, left, G, TILE, WHOLE)
    if MAXIMIZE:
        g = -g
    if DECAYED:
        g = tl.fma(decay + tl.zeros_like(g), p_old, g)
    m = tl.fma(momentum + tl.zeros_like(g), m_old, weight * g)
    g = tl.fma(momentum + tl.zeros_like(g), m, g) if NESTEROV else m
    p = tl.fma(tl.zeros_like(g) - lr, g, p_old)
    if SKIPS:
        p = tl.where(skip, p_old, p)
        m = tl.where(skip, m_old, m)
    store(p_at, at, p, left, P, TILE, WHOLE)
    store(m_out, at, m, left, M, TILE, WHOLE)


@triton.jit(do_not_specialize=["tiles", "lr_bits", "momentum_bits", "weight_bits", "decay_bits"])
def _sgd(
    table, work, tiles, lr_bits, lr_at, momentum_bits, weight_bits, decay_bits, scale_at, infinite_at,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, OP: tl.constexpr, NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECAYED: tl.constexpr, LR_AT: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    line, start, left = mine(table, work, tiles, TILE)
    p_at = address(line, PARAMETER, start, P)
    g_at = address(line, GRADIENT, start, G)
    keeps = tl.load(line + KEPT) != 0
    kept_at = address(line, KEPT, start, P)
    m_in = address(line, MOMENTS, start, M)
    m_out = address(line, MOMENTS + 1, start, M)
    lr = tl.load(lr_at).to(OP) if LR_AT else double(lr_bits).to(OP)
    momentum = double(momentum_bits).to(OP)
    weight = double(weight_bits).to(OP)
    decay = double(decay_bits).to(OP)
    scale = tl.load(scale_at).to(OP) if SCALED else 1.0
    skip = tl.load(infinite_at) == 1 if SKIPS else False
    odd = (p_at | g_at | kept_at | m_in | m_out) & 15
    whole = tl.where(odd == 0, left // TILE, 0)
    for tile in range(whole):
        _tile(
            p_at, g_at, kept_at, keeps, m_in, m_out, tile * TILE, left, lr, momentum, weight, decay, scale, skip,
            P, G, M, OP, NESTEROV, MAXIMIZE, DECAYED, SCALED, SKIPS, TILE, True,
        )  # fmt: skip
    for tile in range(whole, (left + TILE - 1) // TILE):
        _tile(
            p_at, g_at, kept_at, keeps, m_in, m_out, tile * TILE, left - tile * TILE, lr, momentum, weight, decay,
            scale, skip, P, G, M, OP, NESTEROV, MAXIMIZE, DECAYED, SCALED, SKIPS, TILE, False,
        )  # fmt: skip


def sgd(
    table: Table,
    kind: Kind,
    *,
    lr: float,
    lr_at: Tensor | None,
    momentum: float,
    dampening: float,
    decay: float,
    nesterov: bool,
    maximize: bool,
    scale: Tensor | None,
    infinite: Tensor | None,
) -> None:
    """As `zerostall.optim.kernels.adam.adam`."""
    none = table.columns
    _sgd[(table.programs,)](
        table.columns,
        table.work,
        table.tiles,
        bits(lr),
        none if lr_at is None else lr_at,
        bits(momentum),
        bits(1 - dampening),
        bits(decay),
        none if scale is None else scale,
        none if infinite is None else infinite,
        **types(kind),
        NESTEROV=nesterov,
        MAXIMIZE=maximize,
        DECAYED=decay != 0,
        LR_AT=lr_at is not None,
        SCALED=scale is not None,
        SKIPS=infinite is not None,
        TILE=TILE,
        **OPTIONS,
    )
