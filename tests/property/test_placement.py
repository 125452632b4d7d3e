"""Replicas: never at home, apart while that can be had, balanced, and what need not move does not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.core.placement import SLACK, ImageId, Load, Placement, Site, place
from zerostall.core.prefetch import distance
from zerostall.core.topology import Place, apart, hops

UNBOUNDED = 1 << 60


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Load], dict[str, Site]]:
    racks = draw(st.integers(1, 4))
    labelled = draw(st.booleans())
    count = draw(st.integers(1, 12))
    tight = draw(st.booleans())
    sites = {
        f"n{index}": Site(
            Place(rack=f"r{index % racks}", leaf=f"l{index % 2}") if labelled else Place(),
            draw(st.integers(0, 40)) if tight else UNBOUNDED,
        )
        for index in range(count)
    }
    nbytes = st.integers(1, 9)
    loads = [
        Load(ImageId("a", rank), f"n{rank % (count + 1)}", draw(nbytes)) for rank in range(draw(st.integers(0, 30)))
    ]
    return loads, sites


def loads_of(placement: Placement, loads: list[Load]) -> Counter[str]:
    taken: Counter[str] = Counter()
    for load in loads:
        for node in placement.targets[load.image]:
            taken[node] += load.nbytes
    return taken


def check(placement: Placement, loads: list[Load], sites: dict[str, Site], copies: int) -> None:
    taken = loads_of(placement, loads)
    total = sum(load.nbytes for load in loads) * copies
    offered = sum(site.capacity for site in sites.values())
    largest = max((load.nbytes for load in loads), default=0)
    for node, nbytes in taken.items():
        assert nbytes <= sites[node].capacity
        assert nbytes <= SLACK * total * sites[node].capacity / offered + largest
    for load in loads:
        nodes = placement.targets[load.image]
        assert load.home not in nodes and len(set(nodes)) == len(nodes) <= copies
        assert len(nodes) == copies or load.image in placement.short


@settings(max_examples=150)
@given(clusters(), st.integers(1, 2))
def test_what_must_hold(cluster: tuple[list[Load], dict[str, Site]], copies: int) -> None:
    loads, sites = cluster
    first = place(loads, sites, copies=copies)
    check(first, loads, sites, copies)
    assert place(list(reversed(loads)), dict(reversed(sites.items())), copies=copies) == first
    again = place(loads, sites, copies=copies, before=first.targets)
    assert again.targets == first.targets and not again.moved


@settings(max_examples=150)
@given(clusters(), st.data())
def test_losing_a_node_moves_what_was_there(cluster: tuple[list[Load], dict[str, Site]], data: st.DataObject) -> None:
    loads, sites = cluster
    sites = {name: Site(site.place, UNBOUNDED) for name, site in sites.items()}
    first = place(loads, sites)
    lost = data.draw(st.sampled_from(sorted(sites)))
    left = {name: site for name, site in sites.items() if name != lost}
    second = place(loads, left, before=first.targets)
    check(second, loads, left, 1)
    for image, reason in second.moved.items():
        assert first.targets[image] == (lost,) and reason == f"node {lost} is gone"


@settings(max_examples=150)
@given(clusters())
def test_a_node_that_comes_moves_nothing_but_what_was_too_much(cluster: tuple[list[Load], dict[str, Site]]) -> None:
    loads, sites = cluster
    sites = {name: Site(Place(), UNBOUNDED) for name in sites}
    first = place(loads, sites)
    more = {**sites, "new": Site(Place(), UNBOUNDED)}
    second = place(loads, more, before=first.targets)
    check(second, loads, more, 1)
    largest = max((load.nbytes for load in loads), default=0)
    fair = sum(load.nbytes for load in loads) / len(more)
    before = loads_of(first, loads)
    for image in second.moved:
        for node in first.targets[image]:
            assert before[node] > SLACK * fair  # only from nodes that had more than they may have now
    assert all(nbytes <= SLACK * fair + largest for nbytes in loads_of(second, loads).values())


@settings(max_examples=150)
@given(clusters())
def test_copies_are_apart_while_that_can_be_had(cluster: tuple[list[Load], dict[str, Site]]) -> None:
    loads, sites = cluster
    sites = {name: Site(site.place, UNBOUNDED) for name, site in sites.items()}
    placement = place(loads, sites)
    for load in loads:
        if load.home not in sites:
            continue
        here = sites[load.home].place
        best = max((apart(here, site.place) for name, site in sites.items() if name != load.home), default=-1)
        for node in placement.targets[load.image]:
            # Slack may be spent where the best group is much smaller than the rest.
            separation = apart(here, sites[node].place)
            assert separation == best or load.image in placement.short


def test_two_thousand_nodes_are_placed_evenly() -> None:
    sites = {f"n{i}": Site(Place(rack=f"r{i // 16}", leaf=f"l{i // 32}"), UNBOUNDED) for i in range(2000)}
    loads = [Load(ImageId("run", rank), f"n{rank // 8}", 1 << 30) for rank in range(16_000)]
    first = place(loads, sites)
    taken = loads_of(first, loads)
    assert not first.short and set(taken.values()) == {8 << 30}
    # What a node had is spread: no single other node has to serve all of it when it is gone.
    assert all(len({first.targets[ImageId("run", 8 * node + rank)] for rank in range(8)}) == 8 for node in range(2000))
    del sites["n7"]
    assert len(place(loads, sites, before=first.targets).moved) == 8


def test_what_is_short_says_why() -> None:
    two = {"a": Site(Place(rack="r"), 10), "b": Site(Place(rack="r"), 10)}
    placement = place([Load(ImageId("run", 0), "a", 4), Load(ImageId("run", 1), "a", 40)], two)
    assert placement.targets[ImageId("run", 0)] == ("b",)
    assert placement.short[ImageId("run", 0)] == "a and b share a rack: nothing better has room"
    assert "no other node has room for 40 bytes" in placement.short[ImageId("run", 1)]


def test_labels() -> None:
    assert Place.parse("rack=r7, leaf=sw3") == Place("r7", "sw3") and str(Place("r7", pod="p")) == "rack=r7,pod=p"
    assert Place.parse("") == Place()
    for wrong in ("rack", "row=1", "rack=a,rack=b", "rack=../x", "rack="):
        try:
            Place.parse(wrong)
        except ValueError as error:
            assert "write rack=NAME" in str(error)
        else:
            raise AssertionError(wrong)


def test_hops_of_a_fat_tree() -> None:
    here = Place(rack="r1", leaf="l1", pod="p1")
    assert hops(here, Place(rack="r2", leaf="l1", pod="p1")) == 2
    assert hops(here, Place(rack="r1", leaf="l2", pod="p1")) == 4
    assert hops(here, Place(rack="r1", leaf="l2", pod="p2")) == 6
    assert hops(here, Place()) == 4 and hops(Place(), Place()) == 4  # nobody said: neither near nor far


def test_the_nearest_copy_is_one_in_memory_then_by_hops() -> None:
    nodes = {
        "here": Place("r1", "l1", "p1"),
        "leaf": Place("r2", "l1", "p1"),
        "pod": Place("r3", "l2", "p1"),
        "core": Place("r4", "l3", "p2"),
    }
    nearest_first = [
        ("here", "host"),
        ("here", "disk"),
        ("leaf", "replica"),
        ("pod", "host"),
        ("core", "replica"),
        ("leaf", "disk"),
        ("core", "disk"),
        ("pod", "remote"),
    ]
    assert sorted(set(nearest_first), key=lambda copy: distance("here", copy, nodes)) == nearest_first
