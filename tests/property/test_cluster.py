"""Heartbeats late, twice or never, clocks that jump: a node that speaks is not lost, and an old one is fenced."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zerostall.core.cluster import Cluster, Health, Hearing, Patience

PATIENCE = Patience()
NODES = ("a", "b", "c", "d")


class Agents(RuleBasedStateMachine):
    """Four nodes whose agents come, go, are superseded, cut off, and whose messages arrive in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(PATIENCE)
        self.now = 1000.0
        self.passed = 0.0  # seconds that went forward
        self.number = 0
        self.instances: dict[str, str] = {}  # the newest agent of each node
        self.epochs: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.sent: list[tuple[str, int, int]] = []  # messages on their way, which may come late or twice
        self.spoken: dict[str, float] = {}

    @rule(node=st.sampled_from(NODES))
    def start_an_agent(self, node: str) -> None:
        self.number += 1
        before = self.epochs.get(node, 0)
        admission = self.cluster.join(node, f"agent-{self.number}")
        assert admission.epoch is not None and admission.epoch > before
        self.instances[node], self.epochs[node] = f"agent-{self.number}", admission.epoch
        self.sequences[node] = 0
        self.spoken[node] = self.passed

    @rule(node=st.sampled_from(NODES), number=st.integers(1, 20))
    def an_old_agent_asks_again(self, node: str, number: int) -> None:
        old = f"agent-{number}"
        known = self.cluster.nodes.get(node)
        if known is None or self.instances[node] == old or old not in known.retired:
            return
        admission = self.cluster.join(node, old, fenced=True)
        if known.present and admission.epoch is not None:
            assert known.instance == old
        if admission.epoch is not None:
            self.instances[node], self.epochs[node], self.sequences[node] = old, admission.epoch, 0
            self.spoken[node] = self.passed

    @rule(node=st.sampled_from(NODES))
    def join_again(self, node: str) -> None:
        if node not in self.instances:
            return
        admission = self.cluster.join(node, self.instances[node], last_epoch=self.epochs[node])
        assert admission.epoch is not None and admission.epoch >= self.epochs[node]
        if admission.changed:
            self.sequences[node] = 0
        self.epochs[node] = admission.epoch
        if admission.changed:
            self.spoken[node] = self.passed

    @rule(node=st.sampled_from(NODES), delivered=st.booleans())
    def report(self, node: str, delivered: bool) -> None:
        if node not in self.epochs:
            return
        self.sequences[node] += 1
        message = (node, self.epochs[node], self.sequences[node])
        self.sent.append(message)
        if delivered:
            verdict = self.cluster.hear(*message)
            there = self.cluster.nodes[node].present
            assert verdict.hearing is (Hearing.news if there else Hearing.fenced), verdict
            if there:
                self.spoken[node] = self.passed

    @rule(pick=st.integers(0, 1000))
    def an_old_message_comes(self, pick: int) -> None:
        if not self.sent:
            return
        node, epoch, sequence = self.sent[pick % len(self.sent)]
        last = self.cluster.nodes[node].sequence
        verdict = self.cluster.hear(node, epoch, sequence)
        if epoch < self.epochs[node]:
            assert verdict.hearing is Hearing.fenced and verdict.reason
        elif verdict.hearing is Hearing.news:
            assert sequence > last
        if verdict.hearing in (Hearing.news, Hearing.repeated):
            self.spoken[node] = self.passed

    @rule(seconds=st.floats(-50, 200), looks=st.integers(1, 30))
    def time_passes(self, seconds: float, looks: int) -> None:
        """In small steps, or at once (this process stood still), or backwards (a broken clock)."""
        for _ in range(looks):
            self.now += seconds / looks
            self.passed += max(0.0, seconds / looks)
            for change in self.cluster.judge(self.now):
                assert change.reason and change.was is not change.now
                if change.now is Health.lost:
                    assert self.passed - self.spoken[change.node] >= PATIENCE.lost_after - 1e-6

    @rule(node=st.sampled_from(NODES))
    def leave(self, node: str) -> None:
        self.cluster.leave(node, self.epochs.get(node, 0))

    @invariant()
    def only_the_newest_epoch_is_heard(self) -> None:
        for node, known in self.cluster.nodes.items():
            assert known.epoch == self.epochs[node] and known.instance == self.instances[node]


Agents.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestAgents = Agents.TestCase


def alive(*names: str) -> Cluster:
    cluster = Cluster(PATIENCE)
    for name in names:
        cluster.join(name, f"{name}-1")
    cluster.judge(0.0)
    return cluster


def pass_time(cluster: Cluster, start: float, seconds: float, *speaking: str) -> list[str]:
    """Quarter seconds pass while some nodes speak; what changes, in words."""
    changes = []
    for tick in range(int(seconds * 4)):
        for name in speaking:
            node = cluster.nodes[name]
            cluster.hear(name, node.epoch, node.sequence + 1)
        changes += cluster.judge(start + (tick + 1) / 4)
    return [f"{change.node} {change.now.value}: {change.reason}" for change in changes]


def test_a_silent_node_is_suspected_then_lost_and_comes_back_in_a_new_epoch() -> None:
    cluster = alive("a", "b", "c")
    assert pass_time(cluster, 0.0, 6.0, "b", "c") == [
        "a suspected: 2 heartbeats missed",
        "a lost: silent for 5.0 s, the limit is 5 s",
    ]
    assert cluster.hear("a", 1, 7).hearing is Hearing.fenced
    assert cluster.join("a", "a-1", last_epoch=1).epoch == 2
    assert cluster.hear("a", 2, 0).hearing is Hearing.news
    assert cluster.hear("a", 1, 8).hearing is Hearing.fenced  # what was still on its way


def test_a_suspected_node_that_speaks_is_alive() -> None:
    cluster = alive("a", "b", "c")
    pass_time(cluster, 0.0, 3.0, "b", "c")
    cluster.hear("a", 1, 1)
    assert pass_time(cluster, 3.0, 0.25) == ["a alive: heard again"]


def test_time_in_which_the_manager_stood_still_is_nobodys_silence() -> None:
    cluster = alive("a")
    assert cluster.judge(3600.0) == () and cluster.judge(-7200.0) == ()
    assert cluster.nodes["a"].silent <= 2.0


def test_when_most_are_silent_it_may_be_the_manager() -> None:
    cluster = alive("a", "b", "c", "d")
    changes = pass_time(cluster, 0.0, 30.0, "a")
    assert not any(" lost:" in change for change in changes)
    assert "this manager may be the one that is cut off" in cluster.nodes["b"].reason
    assert any("b lost: silent for 60.0 s" in change for change in pass_time(cluster, 30.0, 31.0, "a"))


def test_of_two_agents_the_newer_has_the_node() -> None:
    cluster = alive("a")
    assert cluster.join("a", "a-2").epoch == 2
    assert cluster.hear("a", 1, 1).hearing is Hearing.fenced
    refused = cluster.join("a", "a-1", last_epoch=1, fenced=True)
    assert refused.epoch is None and "belongs to a newer agent" in refused.reason
    assert cluster.join("a", "a-1").epoch is None  # also when it does not own up to it
    pass_time(cluster, 0.0, 6.0)
    assert cluster.join("a", "a-1", last_epoch=1, fenced=True).epoch == 3


def test_a_manager_that_was_restarted_goes_on_in_the_same_epochs() -> None:
    cluster = Cluster(PATIENCE)
    cluster.recall("a", "a-1", 4)
    cluster.recall("gone", "g-1", 2, present=False)
    assert cluster.hear("a", 4, 99).hearing is Hearing.news
    assert cluster.hear("gone", 2, 99).hearing is Hearing.fenced
    assert cluster.hear("a", 5, 0).hearing is Hearing.unknown  # its memory is older than the agent's
    assert cluster.join("a", "a-1", last_epoch=5).epoch == 6


def test_patience_must_make_sense() -> None:
    with pytest.raises(ValueError, match="larger than the one before"):
        Patience(suspect_after=9.0)
