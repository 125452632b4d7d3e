"""How often a run goes to its remote tier, who may use the network, and what would be lost: pure decisions."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand import wait_until
from zerostall import Keep, Remote
from zerostall.core import bandwidth
from zerostall.core.bandwidth import MOST_YIELD_SECONDS, Bucket, Traffic
from zerostall.core.candidates import Past, left_behind
from zerostall.core.policy import Loss, Newest, losses
from zerostall.errors import StorageError
from zerostall.flow.governor import Gate, Governor


@pytest.mark.parametrize(
    ("every", "seconds"), [(30, 30), ("30s", 30), ("10m", 600), ("1.5h", 5400), ("1d", 86400), (0, 0)]
)
def test_times(every: float | str, seconds: float) -> None:
    assert Remote("s3://bucket/run", every=every).seconds == seconds


def test_what_a_remote_says() -> None:
    remote = Remote("s3://bucket/run", keep=24, rate="200M")
    assert remote.retention == Keep(last=24)
    assert remote.bytes_per_second == 200 << 20
    assert Remote("gs://bucket", keep=Keep(last=1, every=1000)).retention.every == 1000
    assert Remote("gs://bucket").bytes_per_second is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "runs/gpt"},
        {"every": "10 parsecs"},
        {"every": -1},
        {"every": float("nan")},
        {"keep": 0},
        {"rate": 0},
        {"rate": "fast"},
    ],
)
def test_what_makes_no_sense_is_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "url" not in wrong else "URL"):
        Remote(**{"url": "s3://bucket/run", **wrong})


def test_what_would_be_lost() -> None:
    tiers = [Newest("host", 30, 100.0), Newest("disk", 20, 90.0), Newest("remote", 10, 40.0)]
    assert losses(tiers, 110.0) == (
        Loss("the training process", "host", 30, 10.0),
        Loss("this machine's power", "disk", 20, 20.0),
        Loss("this machine and its disk", "remote", 10, 70.0),
        Loss("the whole cluster", "remote", 10, 70.0),
    )


def test_where_nobody_trains_nothing_is_lost_but_what_came_after() -> None:
    tiers = [Newest("host", 30, 100.0), Newest("disk", 30, 100.0), Newest("remote", 10, 40.0)]
    assert losses(tiers, 5000.0, training=False) == (
        Loss("the training process", "host", 30, 0.0),
        Loss("this machine's power", "disk", 30, 0.0),
        Loss("this machine and its disk", "remote", 10, 60.0),
        Loss("the whole cluster", "remote", 10, 60.0),
    )
    assert losses([Newest("host", None)], 1.0, training=False)[0] == Loss("the training process", "", None, None)


def test_what_is_nowhere_is_lost() -> None:
    found = losses([Newest("host", 0, 100.0), Newest("disk", None)], 101.0)
    assert found[0] == Loss("the training process", "host", 0, 1.0)
    assert {(loss.tier, loss.step, loss.seconds) for loss in found[1:]} == {("", None, None)}


def test_uploads_yield_but_not_for_ever() -> None:
    assert bandwidth.turn(Traffic(), 0.0).go
    for busy in (Traffic(restores=1), Traffic(promised=1), Traffic(drains=1), Traffic(captures=1)):
        assert not bandwidth.turn(busy, 0.0).go and bandwidth.turn(busy, 0.0).reason
        assert bandwidth.turn(busy, MOST_YIELD_SECONDS).go


@given(st.floats(1e3, 1e10), st.lists(st.integers(1, 1 << 26), min_size=1, max_size=50))
def test_no_more_than_the_rate_passes(rate: float, parts: list[int]) -> None:
    now, bucket = 0.0, Bucket.full(rate, 0.0)
    burst = bucket.level
    for nbytes in parts:
        bucket, wait = bandwidth.take(bucket, nbytes, now)
        now += wait
    assert sum(parts) <= burst + rate * now * (1 + 1e-6) + 1


def test_a_gate_lets_go_when_the_restore_ends_and_breaks_off_when_it_is_closed() -> None:
    governor = Governor()
    gate = Gate(governor)
    passed = threading.Event()
    with governor.restoring():
        thread = threading.Thread(target=lambda: (gate(1), passed.set()))
        thread.start()
        assert governor.traffic() == Traffic(restores=1)
    assert passed.wait(60)
    thread.join(60)
    gate.close()
    with pytest.raises(StorageError, match="broken off"):
        gate(1)


def test_an_upload_waits_while_a_vault_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "MOST_YIELD_SECONDS", 1e9)
    drains = [1]
    governor = Governor(lambda: len(drains))
    gate = Gate(governor)
    thread = threading.Thread(target=gate, args=(1,))
    thread.start()
    wait_until(lambda: gate.reason == "a vault is being drained")
    drains.clear()
    thread.join(60)
    assert not thread.is_alive() and gate.reason == ""


def test_a_far_copy_of_a_past_that_was_left_is_told() -> None:
    near = [Past(5, 10.0), Past(6, 30.0)]
    assert "went back" in left_behind(Past(9, 20.0), near)
    assert "another one" in left_behind(Past(6, 20.0), near)
    assert left_behind(Past(6, 30.0), near) == left_behind(Past(4, 5.0), near) == left_behind(Past(9, 40.0), near) == ""
    assert left_behind(Past(9, 0.0), near) == ""  # a damaged one says nothing
