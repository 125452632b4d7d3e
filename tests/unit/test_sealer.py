"""In which order the agent hears of saves."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

from hand import wait_until
from zerostall.core.roll import Save
from zerostall.telemetry import Stats
from zerostall.trainer.sealer import Sealer
from zerostall.trainer.world import World
from zerostall.wire import messages as m


def test_who_wakes_the_sealer_for_nothing_has_no_later_save_wake_it() -> None:
    """A capture that was given up announces its end, too."""
    sealer = Sealer(SimpleNamespace(), SimpleNamespace(), World.alone(), Stats(), lambda flight, error: None)  # type: ignore[arg-type]
    looked: list[bool] = []

    class Capture:
        def done(self) -> bool:
            looked.append(sealer._early)
            return False

    sealer.begin()
    sealer.seal(SimpleNamespace(taken=SimpleNamespace(capture=Capture())))  # type: ignore[arg-type]
    for times in range(1, 4):
        os.eventfd_write(sealer.announce, 1)
        wait_until(lambda times=times: len(looked) == times)
    assert not any(looked)
    sealer.close()


def test_that_a_save_is_skipped_is_said_after_what_became_of_those_before() -> None:
    """The agent takes a rank's word on a later save for its last on an earlier one."""
    told: list[m.Message] = []
    link = SimpleNamespace(tell=lambda message, timeout=None: told.append(message))
    shelf = SimpleNamespace(discarded=lambda slot: None)
    sealer = Sealer(shelf, link, World.alone(), Stats(), lambda flight, error: None)  # type: ignore[arg-type]
    captured = threading.Event()

    def torn(timeout: float | None) -> None:
        raise RuntimeError("torn")

    flight = SimpleNamespace(
        name=Save(1, 1),
        step=1,
        landed=False,
        taken=SimpleNamespace(
            slot=0,
            capture=SimpleNamespace(done=captured.is_set, wait=torn),
            sources=SimpleNamespace(let_go=lambda: None),
            let_go_of_values=lambda: None,
        ),
    )
    sealer.begin()
    passed = m.Passed(step=2, epoch=1, turn=0, reason="busy", skipped=True)
    sealer.seal(flight)  # type: ignore[arg-type]
    sealer.tell_after(passed, 1.0)
    assert told == []
    captured.set()
    os.eventfd_write(sealer.announce, 1)
    wait_until(lambda: len(told) == 2)
    assert isinstance(told[0], m.Discarded) and told[1] == passed
    sealer.tell_after(passed, 1.0)
    assert told[2:] == [passed]
    sealer.close()
