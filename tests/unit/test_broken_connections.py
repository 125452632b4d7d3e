"""A connection breaks between a trainer and an agent that both live on: whatever each has still heard, no save that
somebody waits for is lost, and no memory is written to while it is read.

Both sides are driven by hand, see parley.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hand import wait_until
from images import HandMade
from parley import LAYOUT, Node, Trainer
from zerostall import native
from zerostall.errors import AgentError
from zerostall.telemetry import Stats
from zerostall.tiers.disk import DiskTier
from zerostall.trainer.ledger import Ledger
from zerostall.trainer.saving import Desk, Saving
from zerostall.wire import messages as m


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "run")
    yield node
    node.close()


def whole(where: Path, step: int) -> bool:
    disk = DiskTier(where, native.Pool("test", 1))
    memory = native.Segment("check", 1 << 16)
    disk.get(step, 0, memory.address)
    return bytes(memory.view(0, LAYOUT.nbytes)) == HandMade(LAYOUT, step).bytes


def fate(saving: Saving) -> tuple[set[str], list[str]]:
    return set(saving.tiers), [str(error) for error in saving._errors.values()]


ORDERS = [
    order
    for order in itertools.product(("nothing", "sealed", "all"), (0, 1, 2), ("before", "away", "after"), (False, True))
    if not (order[0] == "nothing" and order[2] != "after")
]


@pytest.mark.parametrize(("heard", "answers", "written", "second"), ORDERS)
def test_what_is_waited_for_gets_to_disk(node: Node, heard: str, answers: int, written: str, second: bool) -> None:
    """`heard`: by the agent, until it broke. `answers`: how often the trainer heard the agent meanwhile. `written`:
    when the step's way to disk ended. `second`: another save was sealed in the other slot."""
    trainer = Trainer(node)
    trainer.lease()
    first = trainer.save(1)
    assert first is not None
    saving, sealed = first
    if heard != "nothing":
        trainer.say(sealed)
        node.listen()
    if answers:
        trainer.hear()
    promise = trainer.wait_for(saving) if "disk" not in saving.tiers else None
    if heard == "all" and promise is not None:
        trainer.say(promise)
        node.listen()
    if written == "before":
        node.write()
    if answers == 2:
        trainer.hear()
    another = trainer.save(2) if second else None
    node.lose()
    if written == "away":
        node.write()
    said = trainer.come_back()
    # The worst order: the agent hears of a newer image, and whatever slot can be granted is, before it hears of the
    # one that is waited for.
    if another is not None:
        trainer.say(another[1])
        node.listen()
        trainer.hear()
    third = trainer.save(3)
    if third is not None:
        trainer.say(third[1])
        node.listen()
        trainer.hear()
    trainer.say(*said)
    node.listen()
    node.write()
    trainer.hear()
    assert fate(saving) == ({"host", "disk"}, [])
    assert whole(node.run.where, 1)
    # And it goes on: there is a slot for the next one.
    last = trainer.save(4)
    assert last is not None
    trainer.say(last[1], trainer.wait_for(last[0]))
    node.listen()
    node.write()
    trainer.hear()
    assert fate(last[0]) == ({"host", "disk"}, []) and whole(node.run.where, 4)


def test_memory_that_is_read_is_not_granted_although_it_was_handed_over_again(node: Node) -> None:
    trainer = Trainer(node)
    trainer.lease()
    first = trainer.save(1)
    assert first is not None
    trainer.say(first[1])
    node.listen()
    trainer.hear()
    assert node.run.trickle.writing() == 1  # until the node listens to its writer
    second = trainer.save(2)
    assert second is not None
    node.lose()
    trainer.come_back()
    trainer.say(second[1])
    node.listen()
    trainer.hear()
    assert trainer.save(3) is None  # one slot is read, the other one is the newest
    node.write()
    trainer.hear()
    assert trainer.save(3) is not None
    assert whole(node.run.where, 1)


@pytest.mark.parametrize("fails", ["before", "away", "after"])
def test_a_capture_that_came_to_nothing_frees_no_slot_that_was_granted_anew(node: Node, fails: str) -> None:
    """`fails`: when, by the trainer. The agent is told last of all, when a capture may be under way in that slot."""
    trainer = Trainer(node)
    trainer.lease()
    slots = []
    for step in (1, 2):
        slots.append(trainer.shelf.take())
        assert slots[-1] is not None
        if fails == "before":
            discarded = m.Discarded(slots[-1], step, "torn", trainer.shelf.discarded(slots[-1]))
        node.lose()
        if fails == "away":
            discarded = m.Discarded(slots[-1], step, "torn", trainer.shelf.discarded(slots[-1]))
        trainer.come_back()
        if fails == "after":
            discarded = m.Discarded(slots[-1], step, "torn", trainer.shelf.discarded(slots[-1]))
            trainer.say(discarded)
        node.listen()
        trainer.hear()
        busy = trainer.shelf.take()
        assert busy is not None
        trainer.say(discarded)
        node.listen()
        trainer.hear()
        assert trainer.shelf.take() is None, "a second slot, while one is captured into"
        berth = node.run.berths[0]
        assert berth.current is not None and (taken := berth.current.slots.granted()) and taken.index == busy
        trainer.shelf.put_back(busy)
    assert slots[0] == slots[1]  # so it was granted anew indeed
    last = trainer.save(3)
    assert last is not None
    trainer.say(last[1])
    node.listen()
    trainer.hear()
    assert "host" in last[0].tiers


def test_an_image_that_is_told_of_late_is_not_taken_for_what_is_captured_now(node: Node) -> None:
    trainer = Trainer(node)
    trainer.lease()
    first = trainer.save(1)
    assert first is not None
    trainer.say(first[1])
    node.listen()
    trainer.hear()
    assert node.run.trickle.writing() == 1  # until the node listens to its writer
    second = trainer.save(2)
    assert second is not None
    node.lose()
    trainer.come_back()  # both images are handed over, and no slot is left; then
    node.run.berths[0].forget_step(2)  # the second is spoiled by another rank
    node.run.advance()
    trainer.hear()
    assert trainer.shelf.take() == second[1].slot
    trainer.say(second[1])
    node.listen()
    assert node.run.berths[0].sealed_steps() == [1]


def test_a_trainer_that_has_not_said_what_it_holds_is_granted_nothing(node: Node) -> None:
    trainer = Trainer(node)
    trainer.lease()
    saves = [trainer.save(1)]
    assert saves[0] is not None
    trainer.say(saves[0][1])
    node.listen()
    node.lose()
    berth = node.run.berths[0]
    node.welcome()
    assert berth.current is not None
    assert berth.current.slots.granted() is None


def test_what_it_missed_of_a_save_that_came_to_nothing_is_said_again(node: Node) -> None:
    trainer = Trainer(node)
    trainer.lease()
    first = trainer.save(1)
    assert first is not None
    saving, sealed = first
    trainer.say(sealed)
    node.listen()
    node.run.berths[0].send(m.Spoiled(step=1, created=saving.created, rank=1, reason="it fell over"))
    node.run.berths[0].forget_step(1)
    node.lose()
    trainer.come_back()
    assert "disk" not in saving.tiers
    ((kind, text),) = {(type(error).__name__, str(error)) for error in saving._errors.values()}
    assert kind == "RankError" and "it fell over" in text


def test_what_is_revoked_while_the_connection_breaks_is_so_for_the_agent(node: Node) -> None:
    """It has the image in memory and on disk, and would give it to whoever restores."""
    trainer = Trainer(node)
    trainer.lease()
    first = trainer.save(1)
    assert first is not None
    saving, sealed = first
    trainer.say(sealed, trainer.wait_for(saving))
    node.listen()
    node.write()
    trainer.hear()
    assert node.run.steps() == (1,)
    node.lose()
    trainer.shelf.revoked(m.Revoked(step=1, created=saving.created, reason="torn"))  # and it is told to nobody
    trainer.say(*trainer.come_back())
    node.listen()
    node.write()
    wait_until(lambda: node.run.steps() == (), 60)
    assert node.run.berths[0].sealed_steps() == []


def test_memory_that_was_lent_by_an_agent_that_is_gone_is_not_used(node: Node) -> None:
    trainer = Trainer(node)
    trainer.ear.heard(m.Leased(id=1, memory=m.Lent(1, 4096), stride=4096, slots=1))
    assert trainer.ear.adoption() is None
    memory: Any = SimpleNamespace()
    with pytest.raises(AgentError, match="the next save borrows other memory"):
        trainer.shelf.install(memory)


def test_news_that_is_told_again_makes_no_later_failure_good() -> None:
    condition = threading.Condition()
    ledger = Ledger(Path("run"), condition, Stats())
    savings = [Saving(step, Desk(condition), float(step)) for step in (1, 2)]
    for saving in savings:
        ledger.accept(saving)
        ledger.heard(m.Reached(step=saving.step, created=saving.created, tier="host"))
    reached = m.Reached(step=1, created=1.0, tier="disk")
    ledger.heard(reached)
    ledger.heard(m.Failed(step=2, created=2.0, tier="disk", kind="StorageError", message="no room"))
    ledger.heard(reached)
    with pytest.raises(OSError, match="no room"):
        ledger.raise_unreported()
