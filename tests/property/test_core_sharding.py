"""Cutting, sharing and putting together again: against numpy, for any way to cut."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.core import layout as layouts
from zerostall.core import partition, pieces, reshard
from zerostall.core.boxes import Box, runs, stretch, tiling_problem
from zerostall.core.cuts import FLAT, Cut, held
from zerostall.core.layout import Shard
from zerostall.core.partition import Offer, Row, Stand
from zerostall.core.shards import tile_name

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def meshes(draw, shape):
    """A mesh and how a tensor of that shape is cut over it: some of its dimensions replicate."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    cuts = []
    for size in sizes:
        if shape and draw(st.booleans()):
            cuts.append(Cut(draw(st.integers(0, len(shape) - 1)), size, draw(st.integers(1, 3))))
        else:
            cuts.append(None)
    return sizes, cuts


def stands_of(sizes, cuts):
    way = tuple(cut for cut in cuts if cut is not None)
    for coordinate in itertools.product(*map(range, sizes)):
        yield way, tuple(index for index, cut in zip(coordinate, cuts, strict=True) if cut is not None)


def cut_of(box):
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@given(st.data())
def test_a_stretch_is_the_elements_in_order(data):
    shape = data.draw(SHAPES)
    array = np.arange(math.prod(shape)).reshape(shape)
    begin = data.draw(st.integers(0, array.size))
    end = data.draw(st.integers(begin, array.size))
    found = [array[cut_of(box)].ravel() for box in stretch(shape, begin, end)]
    assert np.concatenate([*found, np.zeros(0, int)]).tolist() == list(range(begin, end))
    assert len(found) <= 2 * max(1, len(shape))


@given(st.data())
def test_runs_are_where_a_box_lies(data):
    shape = data.draw(SHAPES)
    array = np.arange(math.prod(shape)).reshape(shape)
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - begin)) for size, begin in zip(shape, start, strict=True))
    box = Box(start, sizes)
    found = [x for first, count in runs(shape, box) for x in range(first, first + count)]
    assert found == array[cut_of(box)].ravel().tolist()


@given(st.data())
def test_what_the_ranks_of_a_mesh_hold_is_the_tensor_and_lies_where_it_says(data):
    shape = data.draw(SHAPES)
    sizes, cuts = data.draw(meshes(shape))
    array = np.arange(math.prod(shape)).reshape(shape)
    seen = set()
    for way, indexes in stands_of(sizes, cuts):
        own = held(shape, way, indexes)
        local = np.full(own.shape, -1)
        for box, at in own.boxes():
            local[cut_of(at)] = array[cut_of(box)]
        assert -1 not in local
        seen.update(local.ravel().tolist())
        if data.draw(st.booleans()):  # any part of the own tensor is found too
            size = local.size
            begin = data.draw(st.integers(0, size))
            end = data.draw(st.integers(begin, size))
            got = [
                array[cut_of(box)].ravel()[0] == local[cut_of(at)].ravel()[0]
                for part in stretch(own.shape, begin, end)
                for box, at in own.boxes(part)
            ]
            assert all(got)
    assert seen == set(range(array.size))


@given(st.data())
def test_what_lies_one_behind_the_other_is_stored_in_runs_and_read_into_any_other_way(data):
    """As FSDP's first version lays it out: with gaps, and as much for the last rank as for the others."""
    ranks = data.draw(st.integers(1, 5))
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=4))
    arrays = [np.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    rows, at = [], 0
    for number, array in enumerate(arrays):
        at += data.draw(st.integers(0, 3))
        rows.append(Row(f"t{number}", "int64", array.shape, 0, ahead=at))
        at += array.size
    each = -(-at // ranks) + data.draw(st.integers(0, 2))
    replicas = data.draw(st.integers(1, 2))
    offer = Offer(((Cut(FLAT, ranks, each),),), tuple(rows))
    stands = [Stand(offer.digest, ((index,),)) for index in range(ranks)] * replicas
    images = []
    for rank, stand in enumerate(stands):
        shards, boxes = [], {}
        for part in partition.decide(rank, stands, {offer.digest: offer}).parts:
            own = held(part.row.shape, offer.ways[0], stand.indexes[0], part.row.ahead)
            array = arrays[int(part.row.name[1:])]
            flat = array.ravel()[own.begin : own.end]
            for number, (box, where) in enumerate(part.boxes):
                name = tile_name(part.row.name, number)
                shards.append(Shard(name, "int64", box.shape, array.shape, box.start))
                boxes[name] = flat[cut_of(where)].reshape(box.shape)
        layout = layouts.build(shards)
        image = bytearray(layout.header)
        for entry in layout.entries:
            image += boxes[entry.name].tobytes()
        images.append((layout, bytes(image)))
    pieces.gather([layout for layout, _ in images]).insist()
    assert sum(e.nbytes for layout, _ in images for e in layout.entries) == 8 * sum(a.size for a in arrays)
    for row, array in zip(rows, arrays, strict=True):
        for cuts, indexes in stands_of(*data.draw(meshes(array.shape))):
            for box, _ in held(array.shape, cuts, indexes).boxes():
                assert (read_back(images, row.name, box) == array[cut_of(box)]).all()


@st.composite
def states(draw, *, ranks=None):
    """Tensors, and how each is cut over one mesh: (name, array, cuts), the mesh's sizes."""
    sizes = draw(st.lists(st.integers(1, 3), max_size=3)) if ranks is None else ranks
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(SHAPES)
        cuts = tuple(
            Cut(draw(st.integers(0, len(shape) - 1)), size, draw(st.integers(1, 2)))
            if shape and draw(st.booleans())
            else None
            for size in sizes
        )
        dtype = draw(st.sampled_from(["int64", "int16", "uint8"]))
        array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
        tensors.append((f"t{number}", array, cuts))
    return sizes, tensors


def store(sizes, tensors, grain=None):
    """What each rank would write: its layout and image."""
    ways = sorted({tuple(cut for cut in cuts if cut) for _, _, cuts in tensors}, key=repr)
    stands, offer = [], None
    for coordinate in itertools.product(*map(range, sizes)):
        indexes: list[tuple[int, ...]] = [()] * len(ways)
        rows = []
        for name, array, cuts in tensors:
            way = ways.index(tuple(cut for cut in cuts if cut))
            mine = tuple(index for index, cut in zip(coordinate, cuts, strict=True) if cut)
            # one way over several choices of mesh dimensions: each gets a way of its own
            rows.append((name, array, cuts, way, mine))
        distinct = sorted({(cuts, way) for _, _, cuts, way, _ in rows}, key=repr)
        table = tuple(tuple(cut for cut in cuts if cut) for cuts, _ in distinct)
        indexes = [next(mine for _, _, c, w, mine in rows if (c, w) == key) for key in distinct]
        offer = Offer(
            table,
            tuple(
                sorted(
                    (Row(n, str(a.dtype), a.shape, distinct.index((c, w))) for n, a, c, w, _ in rows),
                    key=lambda row: row.name,
                )
            ),
        )
        stands.append(Stand(offer.digest, tuple(indexes)))
    offers = {offer.digest: offer}
    by_name = {name: array for name, array, _ in tensors}
    images = []
    for rank in range(len(stands)):
        decided = partition.decide(rank, stands, offers)
        shards, data = [], {}
        for part in decided.parts:
            array = by_name[part.row.name]
            for number, (box, _) in enumerate(part.boxes):
                name = tile_name(part.row.name, number)
                shards.append(Shard(name, part.row.dtype, box.shape, array.shape, box.start))
                data[name] = array[cut_of(box)]
        layout = layouts.build(shards)
        image = bytearray(layout.header)
        for entry in layout.entries:
            assert len(image) == entry.offset
            image += data[entry.name].tobytes()
        images.append((layout, bytes(image)))
    return images


def read_back(images, name, box, chunk_bytes=4096):
    found = pieces.gather([layout for layout, _ in images])
    whole = found.wholes[name]
    out = np.full(box.shape, 99, dtype=whole.dtype)
    for read in reshard.reads(whole, box):
        image = images[read.piece.rank][1]
        raw = b"".join(image[offset : offset + nbytes] for offset, nbytes in read.spans())
        out[cut_of(read.target)] = np.frombuffer(raw, whole.dtype).reshape(read.source.shape)
        one = read.run()
        assert one is None or image[one[0] : one[0] + one[1]] == raw
        needed = {at // chunk_bytes for o, n in read.spans() for at in (o, o + n - 1)}
        assert needed <= set(reshard.chunks([read], chunk_bytes))
    return out


@settings(max_examples=200)
@given(st.data())
def test_any_layout_is_read_into_any_other(data):
    sizes, tensors = data.draw(states())
    images = store(sizes, tensors)
    total = sum(array.nbytes for _, array, _ in tensors)
    assert sum(e.nbytes for layout, _ in images for e in layout.entries) == total  # each byte once
    for name, array, _ in tensors:
        way = data.draw(meshes(array.shape))
        for cuts, indexes in stands_of(*way):
            own = held(array.shape, cuts, indexes)
            for box, _ in own.boxes():
                assert (read_back(images, name, box) == array[cut_of(box)]).all()
    pieces.gather([layout for layout, _ in images]).insist()


@settings(max_examples=40)
@given(st.data())
def test_eight_ranks_go_on_as_three_as_one_and_as_four(data):
    """Each puts together what it stores next from what those before it have stored."""
    arrays = [
        np.arange(math.prod(shape)).reshape(shape) for shape in data.draw(st.lists(SHAPES, min_size=1, max_size=3))
    ]
    arrays = [(f"t{number}", array) for number, array in enumerate(arrays)]
    images = []
    for size in (8, 3, 1, 4):
        cuts = [Cut(data.draw(st.integers(0, a.ndim - 1)), size) if a.ndim else None for _, a in arrays]
        if images:
            found = [(name, read_back(images, name, Box.whole(array.shape))) for name, array in arrays]
            assert all((own == array).all() for (_, own), (_, array) in zip(found, arrays, strict=True))
            arrays = found
        images = store([size], [(name, array, (cut,)) for (name, array), cut in zip(arrays, cuts, strict=True)])
        assert len(images) == size


def test_replicated_state_is_divided_by_bytes():
    shapes = [(1000, 1000), (3,), (70_000,), (17, 5), (300, 41, 7), ()]
    rows = tuple(Row(f"w{number}", "float32", shape, 0) for number, shape in enumerate(shapes))
    offer = Offer(((),), rows)
    for count in (1, 2, 3, 8, 64):
        stands = [Stand(offer.digest, ((),))] * count
        total = sum(math.prod(shape) * 4 for shape in shapes)
        boxes = {row.name: [] for row in rows}
        for rank in range(count):
            decided = partition.decide(rank, stands, {offer.digest: offer})
            mine = sum(box.count * 4 for part in decided.parts for box, _ in part.boxes)
            assert abs(mine - total / count) <= 2 * partition.GRAIN
            assert len([1 for part in decided.parts for _ in part.boxes]) <= len(shapes) + 6
            for part in decided.parts:
                boxes[part.row.name] += [box for box, _ in part.boxes]
        for row in rows:
            assert tiling_problem(row.shape, boxes[row.name]) == ""


def test_overlaps_and_holes_are_found():
    assert tiling_problem((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]) == ""
    assert "overlap" in tiling_problem((4, 4), [Box((0, 0), (3, 4)), Box((2, 0), (2, 4))])
    assert "4 of its 16" in tiling_problem((4, 4), [Box((0, 0), (3, 4))])


def offer_of(*rows, ways=((),)):
    offer = Offer(ways, tuple(Row(*row) for row in rows))
    return offer, Stand(offer.digest, tuple(() if not way else None for way in ways))


def refusal(*pairs, stands=None):
    import pytest

    from zerostall.errors import StateError

    offers = {offer.digest: offer for offer, _ in pairs}
    with pytest.raises(StateError) as caught:
        partition.decide(0, stands or [stand for _, stand in pairs], offers)
    return str(caught.value)


def test_ranks_that_offer_different_things_under_one_name_are_refused_by_name_and_rank():
    one = offer_of(("m.a", "float32", (4,), 0), ("m.w", "float32", (4, 4), 0))
    text = refusal(one, one, offer_of(("m.a", "float32", (4,), 0), ("m.w", "float32", (4, 5), 0)))
    assert "m.w: float32 (4, 4) whole on ranks 0, 1, but float32 (4, 5) whole on rank 2" in text
    assert "m.a" not in text and "RankLocal" in text
    assert "bfloat16 (4, 4)" in refusal(one, offer_of(("m.w", "bfloat16", (4, 4), 0)))
    cut = Offer(((Cut(0, 2),),), (Row("m.w", "float32", (4, 4), 0),))
    stands = [one[1], Stand(cut.digest, ((0,),)), Stand(cut.digest, ((1,),))]
    text = refusal(one, (cut, stands[1]), stands=stands)
    assert "whole on rank 0, but float32 (4, 4) cut along dimension 0 in 2 on ranks 1, 2" in text


def test_a_part_that_no_rank_holds_is_refused():
    cut = Offer(((Cut(0, 3),),), (Row("m.w", "float32", (5, 2), 0),))
    stands = [Stand(cut.digest, ((0,),)), Stand(cut.digest, ((2,),))]
    assert "m.w: 4 of its 10 elements are held by no rank" in refusal((cut, stands[0]), stands=stands)


def test_ranks_with_different_names_each_store_their_own():
    pairs = [offer_of((f"m.stage{rank}", "float32", (8,), 0), ("m.shared", "float32", (40_000,), 0)) for rank in (0, 1)]
    offers = {offer.digest: offer for offer, _ in pairs}
    for rank in (0, 1):
        found = partition.decide(rank, [stand for _, stand in pairs], offers)
        assert [part.row.name for part in found.parts if part.row.name != "m.shared"] == [f"m.stage{rank}"]
        shared = next(part for part in found.parts if part.row.name == "m.shared")
        assert sum(box.count for box, _ in shared.boxes) in range(14_000, 26_001)
        assert found.shared == (partition.Shared((0, 1), ("m.shared",)),)


def test_a_cluster_of_16384_ranks_on_paper():
    """HSDP, 8 replicas of 2048 shards, 2 700 tensors: what one rank decides, and how large what it exchanges is."""
    rows = tuple(Row(f"model.layers.{n // 27}.w{n % 27:02}", "float32", (8192, 1024), 0) for n in range(2_700))
    offer = Offer(((Cut(0, 2048),),), tuple(sorted(rows, key=lambda row: row.name)))
    digest = offer.digest
    stands = [Stand(digest, ((rank % 2048,),)) for rank in range(16_384)]
    said = [partition.encode_stand(stand) for stand in stands]
    assert max(map(len, said)) < 64
    assert len(offer.encode()) < 60 * len(rows)
    assert partition.speakers([partition.decode_stand(data) for data in said]) == {offer.digest: 0}
    found = partition.decide(5_000, stands, {offer.digest: partition.decode_offer(offer.encode())})
    mine = sum(box.count * 4 for part in found.parts for box, _ in part.boxes)
    total = len(rows) * 8192 * 1024 * 4
    assert abs(mine - total / 16_384) <= 2 * partition.GRAIN
    assert found.shared[0].ranks == tuple(range(5_000 % 2048, 16_384, 2048))


def test_names_that_are_tied_on_some_ranks_only_are_refused():
    one = Offer(((),), (Row("m.a", "float32", (4,), 0),), (("m.b", "m.a"),))
    other = offer_of(("m.a", "float32", (4,), 0), ("m.b", "float32", (4,), 0))
    text = refusal((one, Stand(one.digest, ((),))), other)
    assert "m.b: another name for m.a on rank 0, but a tensor of its own on rank 1" in text
