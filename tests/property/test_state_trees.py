"""Any tree of containers, tensors, arrays and values comes back as it was, into new memory and into the user's own."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from state_trip import load, restore, same, save
from zerostall.trainer.state.aliasing import share
from zerostall.trainer.state.tensors import geometry

KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.tuples(st.integers(0, 1), st.text(max_size=1)))
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.arange(max(1, int(np.prod(shape)))).to(draw(TYPES))[: int(np.prod(shape))].reshape(shape).clone()
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.just((1, "x"))
)
ARRAYS = st.builds(
    lambda n, d: np.arange(n, dtype=d), st.integers(0, 4), st.sampled_from(["float64", "int32", "uint16"])
)
TREES = st.recursive(
    st.one_of(ATOMS, tensors(), ARRAYS),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)
ROOTS = st.dictionaries(KEYS, TREES, max_size=5)


def blank(tree: object) -> object:
    """The same tensors and containers, with other bytes and other values."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, np.ndarray):
        return np.zeros_like(tree)
    if isinstance(tree, dict):
        return type(tree)((key, blank(item)) for key, item in tree.items())
    if isinstance(tree, (list, tuple, deque)):
        return type(tree)(blank(item) for item in tree)
    return None


@settings(max_examples=150)
@given(ROOTS)
def test_any_tree_comes_back(tree: dict) -> None:
    before = copy.deepcopy(tree)
    saved = save(s=tree)
    assert same(tree, before), "saving changes nothing"
    assert same(load(saved)["s"], tree)
    target = blank(tree)
    held = [item for item in target.values() if isinstance(item, (torch.Tensor, np.ndarray, dict, list))]
    restore(saved, s=target)
    assert same(target, tree)
    assert [id(item) for item in target.values() if isinstance(item, (torch.Tensor, np.ndarray, dict, list))] == [
        id(item) for item in held
    ]


@st.composite
def windows(draw: st.DrawFn) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return draw(
        st.lists(
            st.one_of(
                st.tuples(st.integers(0, 20), st.tuples(st.integers(1, 8)), st.tuples(st.integers(0, 3))),
                st.tuples(
                    st.integers(0, 20),
                    st.tuples(st.integers(1, 4), st.integers(1, 4)),
                    st.tuples(st.integers(0, 5), st.integers(0, 3)),
                ),
            ),
            min_size=1,
            max_size=6,
        )
    )


@settings(max_examples=200)
@given(windows())
def test_any_windows_of_one_buffer_come_back(places: list) -> None:
    buffer = torch.arange(60.0)
    tree = {f"w{i}": buffer.as_strided(shape, strides, start) for i, (start, shape, strides) in enumerate(places)}
    saved = save(s=tree)
    assert same(load(saved)["s"], tree)
    target = {key: torch.zeros(value.shape) for key, value in tree.items()}
    restore(saved, s=target)
    assert same(target, tree)
    sharing = share(list(tree), [geometry(value) for value in tree.values()])
    named = {list(tree)[index] for index in sharing.bases} | {view.name for view in sharing.views}
    assert named == set(tree), "every name is stored, once"
    assert len(sharing.bases) + len(sharing.views) == len(tree)
