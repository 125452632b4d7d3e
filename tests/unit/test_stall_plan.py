"""What the GPU benchmark measures in the time there is, and what its numbers mean."""

from __future__ import annotations

import pytest

from benchmarks.report import interval
from benchmarks.stall.cases import Case, Outcome, Subject, from_json, to_json
from benchmarks.stall.goals import goals, stalls, throughput
from benchmarks.stall.loop import Step
from benchmarks.stall.plan import chosen, plan


def test_what_fits_is_taken_and_the_rest_is_named() -> None:
    cases = chosen(["gpt-0.7b"], ["all"])
    made = plan(cases, 300.0)
    taken = [case for some in made.processes.values() for case in some]
    assert sum(made.seconds.values()) <= 300.0
    assert taken and made.left_out
    assert sorted(map(str, [*taken, *made.left_out])) == sorted(map(str, cases))
    assert taken[0] == cases[0]


def test_nothing_is_left_out_where_there_is_time() -> None:
    made = plan(chosen(["gpt-0.7b", "gpt-3b"], ["all"]), 1e6)
    assert not made.left_out
    assert len(made.processes[("gpt-0.7b", "hooked")]) > 5
    assert all(len({case.peer for case in cases}) == 1 for (_, name), cases in made.processes.items()
               if name not in ("hooked", "flipping"))  # fmt: skip


def test_an_unknown_system_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such system: overlapp; there are none, "):
        chosen(["gpt-0.7b"], ["overlapp"])


def test_an_interval_is_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.30 / 3**0.5)
    assert interval([5.0])[0] == 5.0 and interval([5.0])[1] == float("inf")


def an_outcome(peer: str = "overlap", *, added: float = 0.003) -> Outcome:
    case = Case(peer, "gpt-0.7b", "every", 1, 0.3, True, 2, 4)
    outcome = Outcome(case, saves=8, bare=[0.3] * 12, saved=[0.303] * 8, added=[added, added])
    outcome.call, outcome.guard, outcome.inserted = [1e-4] * 8, [2e-4] * 8, [5e-5] * 7 + [1e-3]
    outcome.drain = [0.157] * 8
    outcome.trace = [Step(True, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, (0.0, 0.2, 0.3, 0.4), 0.15)]
    return outcome


def test_a_stall_is_the_call_and_the_longer_wait() -> None:
    assert stalls(an_outcome()) == pytest.approx([3e-4] * 7 + [1.1e-3])


def test_throughput_is_what_the_added_time_leaves() -> None:
    assert throughput(an_outcome()) == pytest.approx(0.3 / 0.303)


def test_goals_compare_with_every_other_system() -> None:
    ours = Subject("overlap", "gpt-0.7b", nbytes=8_600_000_000, copy_rate=54e9, load_rate=54e9, outcomes=[an_outcome()])
    other = Subject("torch_checkpointing", "gpt-0.7b", outcomes=[an_outcome("torch_checkpointing", added=0.042)])
    reached = dict(goals([ours, other]))
    assert any("14.0 ×" in found for found in reached.values())
    assert any("added ≤ 3 ms" in goal and found.startswith("3 ms") for goal, found in reached.items())


def test_raw_results_come_back_as_they_were() -> None:
    subject = Subject("overlap", "gpt-0.7b", nbytes=5, outcomes=[an_outcome()])
    assert from_json(to_json(subject)) == subject
