"""Which steps that were put and not committed rank 0's node leaves as they are."""

from __future__ import annotations

import pytest

from zerostall.core.drafts import may_be_committed


@pytest.mark.parametrize(
    ("ranks", "oldest", "own", "stays"),
    [
        ((1,), None, True, True),
        ((1, 3), 5, True, True),
        ((0, 1), None, True, False),  # whoever has rank 0 commits first
        ((), None, True, False),
        ((1,), None, False, False),  # one folder for all
        ((1,), 6, True, False),  # what retention has gone past
    ],
)
def test_the_choice(ranks: tuple[int, ...], oldest: int | None, own: bool, stays: bool) -> None:
    kept, reason = may_be_committed(5, ranks, oldest, own=own)
    assert kept is stays and reason
