"""What an agent that starts makes of what lies on its disk for other nodes."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from images import HandMade, make_layout, replica_of
from zerostall import native
from zerostall.agent.guest_disk import GuestDisk
from zerostall.agent.guests import Guests
from zerostall.tiers.lone_images import LoneImages

YEAR = 365 * 24 * 3600.0


def test_the_newest_copy_of_a_run_stays_however_old(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The node was off for a year, and another run came to it then."""
    pool = native.Pool("disk", 1)
    for run, step, age in (("a" * 16, 1, YEAR), ("a" * 16, 2, YEAR), ("b" * 16, 1, 60.0), ("b" * 16, 2, 0.0)):
        made = HandMade(make_layout(100), step)
        images = LoneImages(tmp_path / run / "rank-00000", pool)
        images.put(made.image, replica_of(made, run=run))
        commit = tmp_path / run / "rank-00000" / f"step-{step:012}" / "replica.json"
        os.utime(commit, (4e9 - age, 4e9 - age))
    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    with caplog.at_level(logging.WARNING, "zerostall"):
        disk = GuestDisk(tmp_path, pool, cast("Guests", None), posted.put)
        posted.get(timeout=60)()
    disk.close()
    held = {note.run: [copy.step for rank in note.ranks for copy in rank.copies] for note in disk.notes()}
    assert held == {"a" * 16: [2], "b" * 16: [1, 2]}
    assert not (tmp_path / ("a" * 16) / "rank-00000" / "step-000000000001").exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / ('a' * 16)} holds the newest copy of a run that was not heard for days: remove it if it is over"
    ]
