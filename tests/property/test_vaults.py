"""Who lends memory to whom: every GPU has a lender that it reaches, each to itself where that can be."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from zerostall.core.vaults import Link, Links, mirror, place

NVLINK, PCIE = Link(0, True), Link(1, False)


def all_of(gpus: list[str], link: Link = NVLINK) -> Links:
    return dict.fromkeys(itertools.permutations(gpus, 2), link)


def names(count: int) -> list[str]:
    return [f"GPU-{k}" for k in range(count)]


@given(st.integers(2, 16))
def test_a_ring_where_all_reach_all(count: int) -> None:
    gpus = names(count)
    found = place(gpus, all_of(gpus))
    assert [found[gpu].gpu for gpu in gpus] == [*gpus[1:], gpus[0]]
    assert all("NVLink" in choice.reason for choice in found.values())


def test_pairs_where_bridges_join_pairs() -> None:
    gpus = names(4)
    links = all_of(gpus, PCIE)
    for one, other in ((0, 2), (2, 0), (1, 3), (3, 1)):
        links[gpus[one], gpus[other]] = NVLINK
    assert [place(gpus, links)[gpu].gpu for gpu in gpus] == [gpus[2], gpus[3], gpus[0], gpus[1]]


def test_none_where_there_is_none() -> None:
    assert place(["a"], {})["a"].gpu is None
    assert "only GPU" in place(["a"], {})["a"].reason
    assert "reaches no other" in place(["a", "b"], {})["b"].reason


def test_a_lender_is_shared_where_no_other_is_left() -> None:
    gpus = ["hub", "a", "b", "c"]
    links: Links = {}
    for gpu in gpus[1:]:
        links[gpu, "hub"] = links["hub", gpu] = NVLINK
    found = place(gpus, links)
    assert found["hub"].gpu in gpus[1:]
    assert [found[gpu].gpu for gpu in gpus[1:]] == ["hub"] * 3
    assert sum("shared" in choice.reason for choice in found.values()) == 2


@st.composite
def topologies(draw: st.DrawFn) -> tuple[list[str], Links]:
    gpus = names(draw(st.integers(1, 7)))
    kinds = st.sampled_from([None, NVLINK, Link(1, True), PCIE])
    links: Links = {}
    for pair in itertools.permutations(gpus, 2):
        link = draw(kinds)
        if link is not None:
            links[pair] = link
    return gpus, links


@given(topologies())
def test_any_topology(drawn: tuple[list[str], Links]) -> None:
    gpus, links = drawn
    found = place(gpus, links)
    assert found == place(gpus, links)
    for gpu in gpus:
        lender = found[gpu].gpu
        reached = [other for other in gpus if (gpu, other) in links]
        assert (lender is None) == (not reached)
        assert lender is None or lender in reached
    lenders = [choice.gpu for choice in found.values() if choice.gpu is not None]
    if _matching(gpus, links) == len(gpus):
        assert len(set(lenders)) == len(gpus)


@given(topologies())
def test_a_mirror_lies_on_a_third_gpu_that_reaches_the_first_copy(drawn: tuple[list[str], Links]) -> None:
    gpus, links = drawn
    first = place(gpus, links)
    second = mirror(gpus, links, first)
    assert second == mirror(gpus, links, first) and set(second) == set(gpus)
    able = {
        gpu: [o for o in gpus if o not in (gpu, first[gpu].gpu) and (o, first[gpu].gpu) in links and (gpu, o) in links]
        for gpu in gpus
    }
    for gpu in gpus:
        chosen = second[gpu].gpu
        assert chosen in able[gpu] if able[gpu] else chosen is None
        assert second[gpu].reason
    mirrors = [choice.gpu for choice in second.values() if choice.gpu is not None]
    if _matching(gpus, {(gpu, other): NVLINK for gpu, others in able.items() for other in others}) == len(gpus):
        assert len(set(mirrors)) == len(gpus)


@given(st.integers(3, 16))
def test_where_all_reach_all_each_gpu_keeps_one_of_each(count: int) -> None:
    gpus = names(count)
    links = all_of(gpus)
    first = place(gpus, links)
    second = mirror(gpus, links, first)
    assert len({choice.gpu for choice in first.values()}) == len({choice.gpu for choice in second.values()}) == count
    assert all(len({gpu, first[gpu].gpu, second[gpu].gpu}) == 3 for gpu in gpus)


def test_two_gpus_have_no_mirror_and_it_is_said_why() -> None:
    gpus = names(2)
    links = all_of(gpus)
    assert "takes three GPUs" in mirror(gpus, links, place(gpus, links))["GPU-0"].reason
    pairs = names(4)
    links = dict.fromkeys([("GPU-0", "GPU-1"), ("GPU-1", "GPU-0"), ("GPU-2", "GPU-3"), ("GPU-3", "GPU-2")], NVLINK)
    assert "no third GPU reaches" in mirror(pairs, links, place(pairs, links))["GPU-0"].reason


def _matching(gpus: list[str], links: Links) -> int:
    """How many can have a lender to themselves, tried out."""
    most = 0

    def go(left: list[str], taken: frozenset[str], so_far: int) -> None:
        nonlocal most
        most = max(most, so_far)
        if not left or most == len(gpus) or so_far + len(left) <= most:
            return
        for other in gpus:
            if (left[0], other) in links and other not in taken:
                go(left[1:], taken | {other}, so_far + 1)
        go(left[1:], taken, so_far)

    go(gpus, frozenset(), 0)
    return most
