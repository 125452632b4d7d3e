"""What a `Checkpointer` may be told: a wrong choice is refused by its name, before anything is started."""

from __future__ import annotations

import pytest

import zerostall


@pytest.mark.parametrize("seconds", ["5m", -1, float("nan"), float("inf"), None])
def test_the_disk_interval_is_a_number_of_seconds(seconds, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"disk_interval=.* is not a number of seconds"):
        zerostall.Checkpointer(tmp_path / "run", disk_interval=seconds)
