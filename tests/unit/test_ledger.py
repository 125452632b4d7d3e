"""The ledger of saves: what the agent says of one save is never taken for another of its number."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerostall.errors import ReplacedError, StepExistsError, TornError, WaitTimeoutError
from zerostall.telemetry import Stats
from zerostall.trainer.ledger import Ledger
from zerostall.trainer.saving import Desk, Saving
from zerostall.wire import messages as m


class Book:
    """A ledger, and savings that are accepted into it."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.stats = Stats()
        self.ledger = Ledger(Path("run"), self.condition, self.stats)
        self.clock = 0.0

    def accept(self, step: int) -> Saving:
        self.clock += 1.0
        saving = Saving(step, Desk(self.condition, reported=self.ledger.reported), self.clock)
        self.ledger.accept(saving)
        return saving


@pytest.fixture
def book() -> Book:
    return Book()


def test_what_print_says(book: Book) -> None:
    assert str(book.ledger) == "no step yet, 0 saves"
    book.stats.saves, book.stats.skipped = 2, 1
    torn, well = book.accept(2), book.accept(3)
    book.ledger.dirty(torn, TornError("step 2: changed"))
    book.ledger.heard(m.Reached(step=3, created=well.created, tier="host"))
    assert str(book.ledger) == f"newest step 3, 2 saves, 1 skipped{', 1 dirty' * book.stats.dirty}"
    assert repr(torn) == "<Saving step 2, tiers: none yet; TornError: step 2: changed>"
    assert repr(well) == "<Saving step 3, tiers: host>"


def test_news_of_a_torn_save_does_not_reach_the_next_of_its_number(book: Book) -> None:
    torn = book.accept(2)
    book.ledger.dirty(torn, TornError("step 2: changed"))
    again = book.accept(2)
    for event in (
        m.Replaced(step=2, created=torn.created, tier="disk"),
        m.Failed(step=2, created=torn.created, tier="disk", kind="StorageError", message="full"),
        m.Reached(step=2, created=torn.created, tier="disk"),
    ):
        book.ledger.heard(event)
    assert again.tiers == frozenset()
    book.ledger.heard(m.Reached(step=2, created=again.created, tier="disk"))
    again.wait("disk", timeout=0)
    with pytest.raises(TornError):
        torn.wait("disk", timeout=0)


def test_each_save_is_later_than_those_before_whatever_the_clock_says(book: Book) -> None:
    moments = []
    for step, clock in enumerate([50.0, 60.0, 10.0, 10.0, 60.0, 61.0], start=1):
        saving = Saving(step, Desk(book.condition), clock)
        book.ledger.accept(saving)
        moments.append(saving.created)
    assert moments == sorted(set(moments))
    assert moments[:2] == [50.0, 60.0] and moments[-1] == 61.0


def test_whoever_waits_has_the_capture_begin(book: Book) -> None:
    asked: list[str] = []
    saving = Saving(
        1, Desk(book.condition, hurry=lambda: asked.append("hurry"), seen=lambda: asked.append("seen")), 1.0
    )
    with pytest.raises(WaitTimeoutError):
        saving.wait("host", timeout=0)
    assert asked == ["hurry", "seen"]


def test_a_step_that_the_trainer_before_had_under_way_is_not_this_trainers(book: Book) -> None:
    saving = book.accept(7)
    book.ledger.heard(m.Reached(step=7, created=saving.created - 100.0, tier="disk"))
    assert saving.tiers == frozenset()


def test_whoever_waits_for_a_save_that_was_made_anew_hears_of_it(book: Book) -> None:
    first = book.accept(2)
    book.accept(2)
    with pytest.raises(ReplacedError, match="step 2"):
        first.wait("disk", timeout=0)


def test_a_torn_replacement_leaves_the_step_that_it_would_have_replaced(book: Book) -> None:
    first = book.accept(2)
    book.ledger.heard(m.Reached(step=2, created=first.created, tier="disk"))
    assert book.ledger.admit(2, "replace") is True
    book.ledger.dirty(book.accept(2), TornError("step 2: changed"))
    with pytest.raises(StepExistsError, match="saved already"):
        book.ledger.admit(2, "error")
    assert book.ledger.admit(2, "replace") is True


def test_a_torn_step_may_be_saved_again(book: Book) -> None:
    book.ledger.dirty(book.accept(2), TornError("step 2: changed"))
    assert book.ledger.admit(2, "error") is False


def test_time_goes_on_from_a_save_that_was_made_by_a_clock_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([9000.0, 200.0, 210.0])
    ticks = iter([0.0, 100.0, 103.0, 113.0])  # the first as the ledger is made
    monkeypatch.setattr(
        "zerostall.trainer.ledger.time", SimpleNamespace(time=lambda: next(clocks), monotonic=lambda: next(ticks))
    )
    book = Book()
    moments: list[float] = []
    for step in (1, 2, 3):
        saving = Saving(step, Desk(book.condition))
        book.ledger.accept(saving)
        moments.append(saving.created)
    assert moments == [9000.0, 9003.0, 9013.0]
