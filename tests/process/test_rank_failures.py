"""One rank fails, or saves alone: the others hear its number in bounded time, and the next save is clean."""

from __future__ import annotations

import re
from pathlib import Path

from ranks.world import Start


def test_one_ranks_failure_is_told_by_number_and_the_next_save_is_clean(start: Start, tmp_path: Path) -> None:
    """With an error that cannot be pickled; and what one rank alone saves does not wait for ever."""
    said = start(3, "one_fails", tmp_path / "run").wait()
    failure = "RankError: step 2 is not clean: rank 2: OddError('nobody knows why')"
    assert [re.findall(r"^second (.*)", text, re.MULTILINE) for text in said] == [
        [failure],
        [failure],
        ["raised nobody knows why"],
    ]
    for text in said:
        assert "third clean" in text and "fifth clean" in text
        assert "exchanges while nothing changed 0" in text
        assert int(re.findall(r"^exchanges for another tensor (\d+)", text, re.MULTILINE)[0]) > 0
    (alone,) = re.findall(r"^fourth (.*)", said[0], re.MULTILINE)
    assert alone.startswith("WaitTimeoutError: step 4") and alone.endswith(
        "nothing has been heard of it from rank 1, 2"
    )


def test_ranks_that_see_other_steps_restore_one_that_all_can_get_and_say_which(start: Start, tmp_path: Path) -> None:
    for said in start(4, "stale_view", tmp_path / "run").wait():
        assert "restored 1 1.0" in said and "then 2 2.0" in said, said
        assert "step 2 is skipped: 2 ranks, rank 1 the first, cannot get it" in said, said
