"""What a trainer says without a message, that it is being read from, and who waits for that."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hand import wait_until
from images import make_layout
from zerostall import native
from zerostall.agent.berth import Berth
from zerostall.agent.runs import Runs
from zerostall.core import bandwidth
from zerostall.core.bandwidth import MOST_WRITE_YIELD_SECONDS, MOST_YIELD_SECONDS, Traffic
from zerostall.flow.budget import Budget
from zerostall.flow.governor import Gate, Governor, WritePace
from zerostall.wire.notice import Notice

LAYOUT = make_layout(5000)


def test_all_but_what_is_waited_for_yields_to_a_capture_and_not_for_ever() -> None:
    busy = Traffic(captures=1)
    for turn, most in ((bandwidth.turn, MOST_YIELD_SECONDS), (bandwidth.write_turn, MOST_WRITE_YIELD_SECONDS)):
        assert turn(Traffic(), 0.0).go
        waits = turn(busy, 0.0)
        assert not waits.go and "captured" in waits.reason and waits.again < 0.1  # it will be over soon
        assert turn(busy, most).go
    assert bandwidth.write_turn(Traffic(promised=1, drains=1), 0.0).go
    for at_it in (0.0, 0.5, 7.0):  # at most a second more than as long again
        most = MOST_WRITE_YIELD_SECONDS + at_it
        assert not bandwidth.write_turn(Traffic(captures=1), most - 0.001, at_it).go
        assert bandwidth.write_turn(Traffic(captures=1), most, at_it).go


def test_a_trainers_word_is_heard_until_it_is_gone() -> None:
    berth = Berth("run", 0, Budget(1 << 20), native.Pool("test", 1))
    tier = berth.lease(LAYOUT, 2)
    theirs = native.Segment.attach(tier.segment.fileno(), tier.segment.nbytes)
    said = Notice.of(theirs.fileno(), theirs.nbytes, tier.stride * 2)
    assert said is not None
    agent = cast("Any", SimpleNamespace(_runs={"run": SimpleNamespace(berths={0: berth})}))
    said.say(busy=True)
    assert Runs.capturing(agent) == 0  # nobody is attached: it was left behind by one that was killed
    berth.client = cast("Any", object())
    assert Runs.capturing(agent) == 1
    said.say(busy=False)
    assert Runs.capturing(agent) == 0
    said.say(busy=True)
    berth.take_back()
    assert not said.busy
    theirs.close()
    said.say(busy=True)  # the page has a mapping of its own


def test_memory_of_an_agent_that_does_not_look_has_no_such_page() -> None:
    segment = native.Segment("old", 8192)
    assert Notice.of(segment.fileno(), segment.nbytes, 8192) is None


@pytest.mark.parametrize("who", ["upload", "write"])
def test_it_goes_on_when_the_capture_is_over(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    monkeypatch.setattr(bandwidth, "MOST_YIELD_SECONDS", 1e9)
    monkeypatch.setattr(bandwidth, "MOST_WRITE_YIELD_SECONDS", 1e9)
    captures, looked = [1], threading.Event()

    def count() -> int:
        looked.set()
        return len(captures)

    governor = Governor(captures=count)
    gate = Gate(governor)
    promised = WritePace(governor, promised=True)
    promised.wait()
    assert promised.free() and not looked.is_set()  # it does not ask
    pace = WritePace(governor, promised=False)
    waits = (lambda: gate(1)) if who == "upload" else pace.wait
    thread = threading.Thread(target=waits)
    thread.start()
    assert looked.wait(60)
    if who == "upload":
        wait_until(lambda: gate.reason == "a snapshot is being captured")
    assert thread.is_alive()
    captures.clear()
    thread.join(60)
    assert not thread.is_alive() and gate.reason == ""
    assert pace.free() and (pace.waited > 0.0) == (who == "write")
