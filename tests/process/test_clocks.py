"""The wall clock is set forward and back while a run trains: nothing is decided by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zerostall
from training import change, saved, tensors
from zerostall import native
from zerostall.core.candidates import Past, left_behind
from zerostall.tiers.disk import DiskTier

pytestmark = pytest.mark.usefixtures("own_agent")

YEAR = 365 * 86400.0
TELLS_TIME = {
    "cli/agent.py",  # to say how long ago something was
    "agent/folder.py",
    "flow/importing.py",
    "integrations/dcp/writer.py",
    "manager/service.py",  # for its list of events
    "tiers/remote_images.py",  # how old an upload is that nobody goes on with
    "tiers/s3.py",
    "tiers/uploads.py",
    "trainer/ledger.py",
}


def test_a_clock_that_jumps_changes_nothing(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1.8e9
    monkeypatch.setattr("zerostall.trainer.ledger.time.time", lambda: now)
    state = tensors(0)
    for jump in (0.0, YEAR, -YEAR, 0.0):  # the clock stands still in between
        now += jump
        with zerostall.Checkpointer(where, state=state, when_busy="wait", keep=100) as ckpt:
            due = ckpt.every(seconds=3600)
            start = ckpt.restore()
            assert int(state["w"][0]) == start
            for step in range(start + 1, start + 4):
                now += -jump / 3 if step % 2 else jump / 3
                change(state["w"])
                assert not due(step)
                ckpt.save(step).wait()
    # Going back sets aside what came later, whatever the clock says.
    now -= YEAR
    with zerostall.Checkpointer(where, state=state, when_busy="wait", keep=100) as ckpt:
        assert ckpt.restore(step=6) == 6
        ckpt.save(7).wait()
        ckpt.save(9).wait()
    assert saved(where) == [1, 2, 3, 4, 5, 6, 7, 9]
    disk = DiskTier(where, native.Pool("test", 1))
    pasts = [Past(step, disk.manifest(step).created) for step in saved(where)]
    assert [past.created for past in pasts] == sorted({past.created for past in pasts})
    assert not any(left_behind(past, pasts) for past in pasts)


def test_nobody_else_asks_the_wall_clock() -> None:
    source = Path(zerostall.__file__).parent
    asks = re.compile(r"\btime\.time\(|\btime_ns\(|datetime\.now\(|utcnow\(")
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if asks.search(path.read_text())}
    assert found - {"tiers/store.py"} == TELLS_TIME  # and the store tells until when a signature is good
