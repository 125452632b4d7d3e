"""The arithmetic and the pages of the benchmark reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import readme, replication
from benchmarks.report import Report, percentile, seconds


@pytest.mark.parametrize(("share", "found"), [(0.0, 1), (0.1, 1), (0.5, 5), (0.51, 6), (0.9, 9), (0.99, 10), (1.0, 10)])
def test_percentile_is_a_sample_that_so_many_do_not_exceed(share: float, found: float) -> None:
    assert percentile([10, 1, 9, 2, 8, 3, 7, 4, 6, 5], share) == found
    assert percentile([3.5], share) == 3.5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5, "2.5 s"),
        (0.0123, "12.3 ms"),
        (0.00001234, "12.3 µs"),
        (0.0, "0 µs"),
        (-0.002, "-2 ms"),
        (1234.0, "1234 s"),
    ],
)
def test_times_have_a_fitting_unit(value: float, text: str) -> None:
    assert seconds(value) == text


def test_a_report_is_written_with_what_it_was_measured_on(tmp_path: Path) -> None:
    page = Report("loop_time", "A title", tmp_path, columns=readme.SHOWN, rows=[tuple("abcdef")])
    page.goals["fast"] = "yes"
    page.samples["call s"] = [0.25, 0.5]
    page.notes.append("a note")
    facts = json.loads(page.write(tmp_path).read_text())
    assert facts["samples"] == {"call s": [0.25, 0.5]}
    assert {"cpu", "cores", "memory", "kernel", "file system"} <= set(facts["hardware"])
    assert {"torch", "python", "zerostall", "commit"} <= set(facts["versions"])
    text = (tmp_path / "loop_time.md").read_text()
    assert "| a | b | c | d | e | f |" in text and "| fast | yes |" in text and "- a note" in text


def test_the_readme_gets_its_table_from_the_results(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    readme.fill(page, tmp_path)
    assert readme.PENDING in page.read_text()
    Report("loop_time", "A title", tmp_path, columns=("x", *readme.SHOWN), rows=[tuple("xabcdef")]).write(tmp_path)
    readme.fill(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "A title" in text and "| a | b | c | d | e | f |" in text and "outdated-row" not in text


@pytest.mark.parametrize(("megabits", "seconds"), [(100, 3.0), (500, 3.0), (2000, 3.0), (25_000, 0.32)])
def test_no_image_is_on_its_way_to_another_node_for_longer_than_seconds(megabits: int, seconds: float) -> None:
    """With 1 GB at 500 Mbit/s that part of the report alone took 70 s."""
    assert replication.size(1.0, megabits) * 1e9 / (megabits * 1e6 / 8) == pytest.approx(seconds)
    assert replication.size(1.0, 0) == 1.0
