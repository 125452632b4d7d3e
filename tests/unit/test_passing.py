"""Whether ranks pass on what they read: what is measured decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostall.core import passing


@pytest.mark.parametrize(
    ("ranks", "read", "passed", "together"),
    [
        (8, 1.0, 0.1, True),  # NVLink beside a disk
        (8, 1.0, 1.0, True),
        (8, 1.0, 7.9, True),  # slower than the disk, and still faster than reading eight times
        (2, 1.0, 2.5, False),  # a fast disk, and ranks that only reach each other by TCP
        (1, 1.0, 9.0, True),
        (4, 0.0, 1.0, True),
    ],
)
def test_the_choice(ranks: int, read: float, passed: float, together: bool) -> None:
    way = passing.choose(ranks, 1 << 30, read, passed)
    assert way.together is together and way.reason


@given(st.integers(2, 64), st.integers(1, 1 << 40), st.floats(1e-6, 1e4), st.floats(1e-6, 1e4))
def test_it_is_the_one_that_takes_less(ranks: int, nbytes: int, read: float, passed: float) -> None:
    times = {True: max(read, passed), False: ranks * read}
    assert times[passing.choose(ranks, nbytes, read, passed).together] == min(times.values())
