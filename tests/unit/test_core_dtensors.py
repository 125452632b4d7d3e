"""How a pickled DTensor is dealt out, as its records say; whatever they say, an answer soon or an error of ours."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostall.core import dtensors
from zerostall.core.boxes import tiling_problem
from zerostall.core.inert import Made
from zerostall.errors import FormatError

MODULE = "torch.distributed.tensor."
SIZE = ("torch", "Size")


def made(name: str, *args: object, **state: object) -> Made:
    modules = {
        "Shard": MODULE + "placement_types",
        "Replicate": MODULE + "placement_types",
        "_StridedShard": MODULE + "placement_types",
        "Partial": MODULE + "placement_types",
        "_rebuild_tensor_v2": "torch._utils",
    }
    one = Made((modules.get(name, "torch"), name), args)
    one.state = state
    return one


def spec(
    shape: object, sizes: tuple[object, ...], at: object, *how: object, old: bool = False, order: object = None
) -> Made:
    meta = made("TensorMeta", Made(SIZE, (shape,)), (1,), None)
    if old:
        mesh = made("DeviceMesh", mesh=made("_rebuild_tensor_v2", None, 0, sizes, ()), _coordinate_on_dim=at)
    else:
        axes = tuple(made("_FlatLayout", shape=(size,), stride=(1,)) for size in sizes)
        mesh = made("DeviceMesh", _layout=made("_MeshLayout", axes=axes), _coordinate_on_dim=at)
    return made("DTensorSpec", mesh=mesh, placements=how, tensor_meta=meta, shard_order=order)


@pytest.mark.parametrize("old", [False, True])
def test_all_ranks_have_all_of_it(old: bool) -> None:
    how = (made("_StridedShard", dim=0, split_factor=3), made("Shard", dim=0), made("Replicate"))
    boxes = []
    for one in range(2):
        for two in range(3):
            shape, own = dtensors.read(spec((13, 2), (2, 3, 4), (one, two, 1), *how, old=old))
            assert shape == (13, 2) and own is not None
            boxes += [box for box, _ in own.boxes()]
    assert not tiling_problem((13, 2), boxes)


def test_whoever_is_not_in_the_mesh_has_nothing() -> None:
    assert dtensors.read(spec((4,), (2,), None, made("Shard", dim=0))) == ((4,), None)


def test_what_is_unknown_or_a_lie_is_refused() -> None:
    shard, order = made("Shard", dim=0), (made("ShardOrderEntry", 0, (1, 0)),)
    cases = [
        (spec((4,), (2,), (0,), made("Partial")), "none|unknown"),
        (spec((4,), (2,), (0,), made("Shard", dim=1)), "placement of it"),
        (spec((4,), (2,), (0,), made("_StridedShard", dim=0, split_factor=1 << 60)), "placement of it"),
        (spec((4,), (2,), (0,), made("_StridedShard", dim=0, split_factor=1 << 16)), "too many strips"),
        (spec((4,), (2,), (2,), shard), "not in its mesh"),
        (spec((4,), (2, 2), (0, 0), shard), "do not go together"),
        (spec((4,), (1 << 40,), (0,), shard), "shape"),
        (spec((4,), (0,), (0,), shard), "its mesh is none"),
        (spec((-4,), (2,), (0,), shard), "shape"),
        (spec((1,) * 1000, (2,), (0,), shard), "shape"),
        (spec((4,), (2, 2), (0, 0), shard, shard, order=order), "another order"),
        (made("DTensorSpec"), "should be a DeviceMesh"),
        ("text", "should be a DeviceMesh"),
    ]
    for record, words in cases:
        with pytest.raises(FormatError, match=words):
            dtensors.read(record)


ANYTHING = st.recursive(
    st.none() | st.integers(-3, 1 << 62) | st.text(max_size=3) | st.booleans(),
    lambda inner: st.tuples(inner, inner) | st.lists(inner, max_size=3) | st.builds(lambda x: made("Shard", x), inner),
    max_leaves=6,
)


@given(st.data())
def test_whatever_stands_there(data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 5), max_size=3).map(tuple) | ANYTHING
    placed = st.builds(
        lambda name, dim, strips: made(name, dim=dim, split_factor=strips),
        st.sampled_from(["Shard", "Replicate", "_StridedShard", "Partial"]),
        st.integers(-2, 3) | ANYTHING,
        st.integers(0, 70) | ANYTHING,
    )
    how = data.draw(st.lists(placed | ANYTHING, max_size=3))
    sizes = data.draw(st.lists(st.integers(0, 6) | ANYTHING, max_size=3))
    record = spec(
        data.draw(numbers),
        tuple(sizes),
        data.draw(numbers),
        *how,
        old=data.draw(st.booleans()),
        order=data.draw(ANYTHING),
    )
    try:
        shape, own = dtensors.read(record)
    except FormatError:
        return
    if own is not None:
        assert sum(box.count for box, _ in own.boxes()) <= math.prod(shape)
