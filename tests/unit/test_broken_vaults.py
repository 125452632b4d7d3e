"""A connection breaks while an image is on its way from a vault to host memory: it is lost only if the vault is.

Both sides are driven by hand, see parley.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from images import HandMade, record_of
from parley import LAYOUT, Node, Trainer
from zerostall.core import manifest as manifests
from zerostall.trainer.saving import Saving
from zerostall.wire import lockers as w
from zerostall.wire import messages as m

RENT = m.Rent(gpu="GPU-1", nbytes=LAYOUT.nbytes)


class Vaults:
    """One vault, which lends two places at once and does what it is told when `answer` says so."""

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.renter: Any = None
        self._number = 0

    def lend(self, gpu: str, request: w.Lend, renter: Any) -> None:
        self.renter = renter
        renter.opened(w.Opened(key=request.key, handle=b"handle", places=2))

    def order(self, gpu: str, order: Any, renter: Any) -> None:
        self.orders.append(order)

    def next_order(self) -> int:
        self._number += 1
        return self._number

    def answer(self, step: int) -> None:
        """What was captured for that step is in host memory."""
        order = self.orders.pop(0)
        sums = record_of(LAYOUT, HandMade(LAYOUT, step).bytes, step).checksums
        self.renter.emptied(w.Emptied(id=order.id, checksums=tuple(sums), seconds=0.0, ghosts=()))

    def take_back(self, gpu: str, key: int) -> None: ...

    def show(self, gpu: str, message: object, fd: int) -> None: ...

    def end(self, gpu: str, reason: str) -> None: ...


class Renter(Trainer):
    """A trainer that captures into the vault."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.lockers._rent = RENT  # so that another agent would be told
        self.say(RENT)
        self.lease()
        while self.shelf.place[0] == 0:  # what was granted before the vault had answered is for host memory
            early = self.save(100)
            assert early is not None
            self.say(early[1])
            self.node.listen()
            self.hear()

    def stow(self, step: int) -> tuple[Saving, m.Sealed]:
        """As `save`: the image is whole, but for what the vault has still to bring."""
        place = self.shelf.place
        with self.condition:
            slot = self.shelf.take()
        memory = self.shelf.memory
        assert slot is not None and memory is not None and place[0]
        made = HandMade(LAYOUT, step)
        saving = Saving(step, self.desk, made.created)
        self.ledger.accept(saving)
        memory.segment.view(slot * memory.stride, LAYOUT.nbytes)[:] = made.bytes  # the vault's part, too, early
        run = self.node.run.folder.facts.run
        record = record_of(LAYOUT, made.bytes, step, run=run, created=made.created)
        record = msgspec.structs.replace(record, checksums=[0] * len(record.checksums), checksum=0)
        stowed = m.Stowed(*place, runs=((0, LAYOUT.nbytes),))
        image = m.Sealed(slot=slot, record=manifests.encode_record(record), stowed=stowed)
        return saving, self.shelf.stowed(step, made.created, image)


@pytest.fixture
def vaults() -> Vaults:
    return Vaults()


@pytest.fixture
def node(tmp_path: Path, vaults: Vaults) -> Iterator[Node]:
    node = Node(tmp_path / "run", vaults)
    yield node
    node.close()


ORDERS = list(itertools.product((False, True), ("before", "away", "after"), (False, True)))


@pytest.mark.parametrize(
    ("heard", "drained", "told"), [one for one in ORDERS if one[0] or (one[1] == "after" and not one[2])]
)
def test_what_is_in_a_vault_that_lives_is_not_lost(
    node: Node, vaults: Vaults, heard: bool, drained: str, told: bool
) -> None:
    """`heard`: the agent has been told of the image before it breaks. `drained`: when the vault has brought the rest.
    `told`: whether the trainer hears what it was told until then.
    """
    trainer = Renter(node)
    saving, image = trainer.stow(101)
    if heard:
        trainer.say(image)
        node.listen()
        if drained == "before":
            vaults.answer(101)
    if told:
        trainer.hear()
    trainer.wait_for(saving)
    node.lose()
    if drained == "away":
        vaults.answer(101)
    said = trainer.come_back()
    if not heard:
        trainer.say(image)  # the sealer tells it once more
    trainer.say(*said)
    node.listen()
    if drained == "after":
        vaults.answer(101)
    node.write()
    trainer.hear()
    assert saving.tiers == {"host", "disk"} and not saving._errors, (saving.tiers, saving._errors)
    # And it goes on, from the vault, too.
    second, image = trainer.stow(102)
    trainer.say(image)
    node.listen()
    vaults.answer(102)
    trainer.hear()
    assert "host" in second.tiers


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_was_in_a_vault_that_has_ended_is_said_to_be_lost(node: Node, vaults: Vaults, moment: str) -> None:
    trainer = Renter(node)
    saving, image = trainer.stow(101)
    if moment == "before":
        trainer.say(image)
        node.listen()
    node.lose()
    vaults.renter.lost("killed")
    trainer.come_back()
    trainer.hear()
    ((kind, text),) = {(type(error).__name__, str(error)) for error in saving._errors.values()}
    assert kind == "AgentError" and "vault" in text
    assert not trainer.shelf.take_stowed()
