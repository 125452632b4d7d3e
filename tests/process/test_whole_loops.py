"""The whole loop goes on exactly: data, schedule, scale, random numbers, and the step that was half accumulated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hand import wait_until
from ranks.world import Start

pytestmark = pytest.mark.timeout(300)


def after(word: str, said: str) -> list[str]:
    found = re.findall(rf"^{word} (.*)$", said, re.MULTILINE)
    assert len(found) == 1, said
    return found[0].split()


@pytest.mark.parametrize("step", [1, 3])
def test_killed_between_two_micro_batches_it_ends_bit_for_bit(start: Start, tmp_path: Path, step: int) -> None:
    expected = tmp_path / "expected"
    whole = start(2, "whole_loop", tmp_path / "whole", expected, -1).wait()
    assert after("drew", whole[0]) != after("drew", whole[1])  # each rank has random numbers of its own
    broken = start(2, "whole_loop", tmp_path / "run", expected, step)
    wait_until(lambda: broken.rank[1].ended(), 60)
    broken.kill()
    scale = 8.0 * 2 ** (step // 2)
    for said in start(2, "whole_loop", tmp_path / "run", expected, -1).wait():
        # What the half step has read of the data does not count.
        assert f"restored {step} seen {step * 2 * 2 * 3} scale {scale}" in said, said
        assert "equal" in said


def test_random_numbers_go_on_with_the_rank_of_that_number_in_any_world(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = [after("drew", said) for said in start(3, "generators", run, 100).wait()]
    assert len(set(map(tuple, first))) == 3
    fewer = start(2, "generators", run, 200).wait()
    assert [after("drew", said) for said in fewer] == first[:2]
    more = start(3, "generators", run, 300).wait()
    assert [after("drew", said) for said in more[:2]] == first[:2]
    assert after("drew", more[2]) == after("unsaved", more[2])
    told = ["no random generators were saved for rank" in said for said in (*fewer, *more)]
    assert told == [False, False, False, False, True]
