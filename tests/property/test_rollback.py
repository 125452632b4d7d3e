"""Steps × copies: what is clean can be had whole, what is dirty stays so, and one goes back to the newest clean one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zerostall.core import prefetch
from zerostall.core.prefetch import MEMORY
from zerostall.core.rollback import ALL, Holding, Home, Key, Standing, Steps, Verdict, target
from zerostall.core.topology import Place

WORLD = 3
RUN = "run"


def key(step: int, attempt: str = "1") -> Key:
    return Key(RUN, step, attempt)


class Copies(RuleBasedStateMachine):
    """Three ranks on three nodes seal, lose and replicate images in any order; a node may go and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()
        self.held: dict[str, set[Holding]] = {f"n{rank}": set() for rank in range(WORLD)}
        self.trains = [True] * WORLD
        self.absent: dict[str, str] = {}
        self.was_dirty: set[Key] = set()
        for node in self.held:
            self._say(node)

    def _say(self, node: str) -> None:
        if node not in self.absent:
            rank = int(node[1:])
            self.steps.say(node, [Home(RUN, rank, WORLD, self.trains[rank])], self.held[node], 0.0)

    @rule(rank=st.integers(0, WORLD - 1), step=st.integers(1, 6), attempt=st.sampled_from("12"))
    def seal(self, rank: int, step: int, attempt: str) -> None:
        self.held[f"n{rank}"].add(Holding(key(step, attempt), rank, "host"))
        self._say(f"n{rank}")

    @rule(rank=st.integers(0, WORLD - 1), other=st.integers(0, WORLD - 1), step=st.integers(1, 6))
    def replicate(self, rank: int, other: int, step: int) -> None:
        if Holding(key(step), rank, "host") in self.held[f"n{rank}"]:
            self.held[f"n{other}"].add(Holding(key(step), rank, "replica"))
            self._say(f"n{other}")

    @rule(node=st.integers(0, WORLD - 1), step=st.integers(1, 6))
    def store(self, node: int, step: int) -> None:
        self.held[f"n{node}"].add(Holding(key(step), ALL, "disk"))
        self._say(f"n{node}")

    @rule(node=st.integers(0, WORLD - 1), step=st.integers(1, 6))
    def make_room(self, node: int, step: int) -> None:
        self.held[f"n{node}"] = {holding for holding in self.held[f"n{node}"] if holding.key.step != step}
        self._say(f"n{node}")

    @rule(node=st.integers(0, WORLD - 1))
    def lose(self, node: int) -> None:
        self.absent[f"n{node}"] = "silent"
        self.steps.gone(f"n{node}", 0.0)

    @rule(node=st.integers(0, WORLD - 1))
    def come_back(self, node: int) -> None:
        if self.absent.pop(f"n{node}", None):
            self._say(f"n{node}")

    @rule(rank=st.integers(0, WORLD - 1), trains=st.booleans())
    def trainer(self, rank: int, trains: bool) -> None:
        self.trains[rank] = trains
        self._say(f"n{rank}")

    def _in_reach(self, wanted: Key) -> set[int]:
        held = {h for node, held in self.held.items() if node not in self.absent for h in held if h.key == wanted}
        ranks = {holding.rank for holding in held}
        return set(range(WORLD)) if ALL in ranks else ranks

    def _stored(self, wanted: Key) -> bool:
        whole = Holding(wanted, ALL, "disk")
        return any(whole in held for node, held in self.held.items() if node not in self.absent)

    @invariant()
    def what_is_said_is_so(self) -> None:
        if RUN not in self.steps.runs:
            return
        verdicts = self.steps.judge(RUN, self.absent, 0.0)
        clean = []
        for verdict in verdicts:
            assert verdict.reason
            there = self._in_reach(verdict.key)
            assert verdict.have == len(there)
            if verdict.standing is Standing.clean:
                assert there == set(range(WORLD))
                assert verdict.key not in self.was_dirty or self._stored(verdict.key)
                clean.append(verdict.key)
            elif verdict.standing is Standing.dirty:
                self.was_dirty.add(verdict.key)
            else:
                assert there != set(range(WORLD))
        chosen = target(verdicts)
        assert chosen.reason
        assert chosen.key == (max(clean) if clean else None)
        if chosen.key is not None:
            self._every_rank_finds_it(chosen.key)

    def _every_rank_finds_it(self, chosen: Key) -> None:
        nodes = {node: Place() for node in self.held if node not in self.absent} | {"spare": Place()}
        found = prefetch.decide(self.steps, chosen, nodes, ["spare"])
        for errand in found.errands:
            assert errand.reason and (errand.source, errand.tier) in self.steps.holders(chosen, errand.rank)
            assert errand.source in nodes and errand.node in nodes
        coming = {errand.rank: errand.node for errand in found.errands}
        waiting = {rank for rank, _ in found.waiting}
        for rank in range(WORLD):
            home, trains = self.steps.runs[RUN].homes.get(rank, (f"n{rank}", True))
            if home in nodes and not trains and rank not in waiting:
                memory = any(node == home and tier in MEMORY for node, tier in self.steps.holders(chosen, rank))
                assert memory or coming.get(rank) == home


Copies.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestCopies = Copies.TestCase


def two_nodes() -> Steps:
    steps = Steps()
    for rank in range(2):
        held = [Holding(key(step), rank, "host") for step in (10, 20)]
        steps.say(f"n{rank}", [Home(RUN, rank, 2, True)], held, 0.0)
    return steps


def standing(verdicts: tuple[Verdict, ...]) -> dict[int, tuple[str, str]]:
    return {verdict.key.step: (verdict.standing.value, verdict.reason) for verdict in verdicts}


def test_a_step_in_flight_on_a_lost_node_is_dirty_at_once_and_for_good() -> None:
    steps = two_nodes()
    steps.say("r1", [], [Holding(key(20), 1, "replica")], 0.0)
    steps.say("n0", [Home(RUN, 0, 2, True)], [Holding(key(step), 0, "host") for step in (20, 30)], 1.0)
    assert standing(steps.judge(RUN, {}, 1.0))[30][0] == "in flight"
    steps.gone("n1", 2.0)
    absent = {"n1": "silent for 5.0 s"}
    verdicts = steps.judge(RUN, absent, 2.0)
    assert standing(verdicts)[30] == ("dirty", "rank 1 was on node n1, which is gone: silent for 5.0 s")
    assert standing(verdicts)[20][0] == "clean"
    chosen = target(verdicts)
    assert chosen.key == key(20)
    assert chosen.reason.startswith("step 20 is the newest with all 2 ranks; step 30 is dirty: rank 1 was on node n1")
    # The old node comes back and has sealed its image by now: nobody may go there any more.
    steps.say("n1", [Home(RUN, 1, 2, True)], [Holding(key(30), 1, "host")], 3.0)
    assert standing(steps.judge(RUN, {}, 3.0))[30][0] == "dirty"


def test_a_rank_that_is_further_does_not_come_back() -> None:
    steps = two_nodes()
    steps.say("n0", [Home(RUN, 0, 2, True)], [Holding(key(step), 0, "host") for step in (20, 30)], 1.0)
    steps.say("n1", [Home(RUN, 1, 2, True)], [Holding(key(step), 1, "host") for step in (20, 40)], 1.0)
    found = standing(steps.judge(RUN, {}, 1.0))
    assert found[30] == ("dirty", "rank 1 is at step 40 already")
    assert found[40] == ("in flight", "1 of 2 ranks are to come, rank 0 the first")


def test_images_of_two_attempts_are_no_snapshot() -> None:
    steps = Steps()
    steps.say("n0", [Home(RUN, 0, 2, True)], [Holding(key(10, "1"), 0, "host")], 0.0)
    steps.say("n1", [Home(RUN, 1, 2, True)], [Holding(key(10, "2"), 1, "host")], 0.0)
    assert all(verdict.standing is Standing.flight for verdict in steps.judge(RUN, {}, 0.0))


def test_older_clean_steps_make_room() -> None:
    steps = two_nodes()
    steps.judge(RUN, {}, 0.0)
    steps.say("n0", [Home(RUN, 0, 2, True)], [Holding(key(20), 0, "host")], 1.0)
    assert standing(steps.judge(RUN, {}, 1.0))[10] == ("past", "was clean; the image of rank 0 is not there any more")


def test_the_nearest_copy_goes_to_the_spare_node_that_has_most() -> None:
    steps = two_nodes()
    steps.say("far", [], [Holding(key(20), 1, "replica")], 0.0)
    steps.say("near", [], [Holding(key(20), 1, "replica")], 0.0)
    steps.say("shelf", [], [Holding(key(20), ALL, "disk")], 0.0)
    steps.gone("n1", 1.0)
    nodes = {
        "n0": Place(leaf="l1"),
        "far": Place(leaf="l9", pod="p9"),
        "near": Place(leaf="l2"),
        "shelf": Place(leaf="l2"),
        "s1": Place(leaf="l2", pod="p1"),
    }
    (errand,) = prefetch.decide(steps, key(20), nodes, ["s1"]).errands
    assert (errand.node, errand.rank, errand.source, errand.tier) == ("s1", 1, "near", "replica")
    assert errand.reason == "rank 1 will ask for step 20, in place of node n1; its nearest copy is near's replica"
    assert prefetch.decide(steps, key(20), nodes, ["s1", "far"]).errands == ()  # its memory has it already
    none = prefetch.decide(steps, key(20), nodes, [])
    assert none.waiting == ((1, "node n1 is gone and no spare node is there"),)


@pytest.mark.parametrize("tier", ["disk", "partner"])
def test_what_lies_on_a_disk_alone_waits_for_the_nodes_that_have_the_rest(tier: str) -> None:
    """Nodes come up one after the other, and only images of clean steps get to disk."""
    steps = Steps()
    for rank, node in enumerate(("n0", "n1")):
        steps.say(node, [Home(RUN, rank, 2, True)], [], 0.0)
    steps.say("n0", [Home(RUN, 0, 2, True)], [Holding(key(20), 0, tier)], 1.0)
    (verdict,) = steps.judge(RUN, {"n1": "silent"}, 1.0)
    assert (verdict.standing, verdict.have) == (Standing.past, 1)
    steps.say("n1", [Home(RUN, 1, 2, True)], [Holding(key(20), 1, tier)], 2.0)
    (verdict,) = steps.judge(RUN, {}, 2.0)
    assert verdict.standing is Standing.clean
