"""The rules that have one moment: stochastic gradient descent with momentum, and Lion."""

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
    p_at, g_at, kept_at, keeps, m_in, m_out, at, left, lr, first, second, decay, scale, skip,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, OP: tl.constexpr, LION: tl.constexpr, NESTEROV: tl.constexpr,
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
    p = p_old
    if LION:
        if DECAYED:
            p = tl.fma(tl.zeros_like(p) - lr * decay, p, p)
        blend = tl.fma(first + tl.zeros_like(g), m_old, tl.fma(tl.zeros_like(g) - first, g, g))
        by = tl.where(blend > 0, 1.0, tl.where(blend < 0, -1.0, blend))  # what is no number stays none
        m = tl.fma(second + tl.zeros_like(g), m_old, tl.fma(tl.zeros_like(g) - second, g, g))
    else:
        if DECAYED:
            g = tl.fma(decay + tl.zeros_like(g), p, g)
        m = tl.fma(first + tl.zeros_like(g), m_old, second * g)
        by = tl.fma(first + tl.zeros_like(g), m, g) if NESTEROV else m
    p = tl.fma(tl.zeros_like(g) - lr, by, p)
    if SKIPS:
        p = tl.where(skip, p_old, p)
        m = tl.where(skip, m_old, m)
    store(p_at, at, p, left, P, TILE, WHOLE)
    store(m_out, at, m, left, M, TILE, WHOLE)


@triton.jit(do_not_specialize=["tiles", "lr_bits", "first_bits", "second_bits", "decay_bits"])
def _one_moment(
    table, work, tiles, lr_bits, lr_at, first_bits, second_bits, decay_bits, scale_at, infinite_at,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, OP: tl.constexpr, LION: tl.constexpr, NESTEROV: tl.constexpr,
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
    first = double(first_bits).to(OP)
    second = double(second_bits).to(OP)
    decay = double(decay_bits).to(OP)
    scale = tl.load(scale_at).to(OP) if SCALED else 1.0
    skip = tl.load(infinite_at) == 1 if SKIPS else False
    odd = (p_at | g_at | kept_at | m_in | m_out) & 15
    whole = tl.where(odd == 0, left // TILE, 0)
    for tile in range(whole):
        _tile(
            p_at, g_at, kept_at, keeps, m_in, m_out, tile * TILE, left, lr, first, second, decay, scale, skip,
            P, G, M, OP, LION, NESTEROV, MAXIMIZE, DECAYED, SCALED, SKIPS, TILE, True,
        )  # fmt: skip
    for tile in range(whole, (left + TILE - 1) // TILE):
        _tile(
            p_at, g_at, kept_at, keeps, m_in, m_out, tile * TILE, left - tile * TILE, lr, first, second, decay,
            scale, skip, P, G, M, OP, LION, NESTEROV, MAXIMIZE, DECAYED, SCALED, SKIPS, TILE, False,
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
    _launch(table, kind, lr, lr_at, momentum, 1 - dampening, decay, maximize, scale, infinite, nesterov=nesterov)


def lion(
    table: Table,
    kind: Kind,
    *,
    lr: float,
    lr_at: Tensor | None,
    beta1: float,
    beta2: float,
    decay: float,
    maximize: bool,
    scale: Tensor | None,
    infinite: Tensor | None,
) -> None:
    """As `zerostall.optim.kernels.adam.adam`."""
    _launch(table, kind, lr, lr_at, beta1, beta2, decay, maximize, scale, infinite, is_lion=True)


def _launch(
    table: Table,
    kind: Kind,
    lr: float,
    lr_at: Tensor | None,
    first: float,
    second: float,
    decay: float,
    maximize: bool,
    scale: Tensor | None,
    infinite: Tensor | None,
    *,
    is_lion: bool = False,
    nesterov: bool = False,
) -> None:
    none = table.columns
    _one_moment[(table.programs,)](
        table.columns,
        table.work,
        table.tiles,
        bits(lr),
        none if lr_at is None else lr_at,
        bits(first),
        bits(second),
        bits(decay),
        none if scale is None else scale,
        none if infinite is None else infinite,
        **types(kind),
        LION=is_lion,
        NESTEROV=nesterov,
        MAXIMIZE=maximize,
        DECAYED=decay != 0,
        LR_AT=lr_at is not None,
        SCALED=scale is not None,
        SKIPS=infinite is not None,
        TILE=TILE,
        **OPTIONS,
    )
