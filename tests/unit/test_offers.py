"""What a home tells the nodes that keep copies of its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parley import LAYOUT, SLOTS, Node, Trainer
from zerostall.agent.replication import Replication
from zerostall.core.candidates import Past
from zerostall.core.placement import ImageId
from zerostall.tiers.host import stride_of
from zerostall.wire import messages as m
from zerostall.wire import peers as p


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "run")
    yield node
    node.close()


def offers_of(node: Node) -> Any:
    """Gives the offer of now each time it is called."""
    home = SimpleNamespace(
        _runs=[node.run], _gone={}, _offered={}, _settled={}, door=SimpleNamespace(address="127.0.0.1:1")
    )
    plan = {ImageId(node.run.folder.facts.run, 0): (SimpleNamespace(address="127.0.0.1:2"),)}

    def offer() -> p.Offer:
        unbound: Any = Replication._offers
        ((_, offer),) = unbound(home, plan)
        return offer

    return offer


@pytest.mark.parametrize("newer", [False, True], ids=["the newest", "a newer one is there by now"])
def test_an_image_that_is_revoked_is_gone_whatever_came_after_it(node: Node, newer: bool) -> None:
    """A partner keeps the newest clean one otherwise, and takes this one for that."""
    trainer = Trainer(node)
    trainer.lease()
    offer = offers_of(node)
    torn = trainer.save(1)
    assert torn is not None
    trainer.say(torn[1])
    node.listen()
    trainer.hear()
    past = Past(1, torn[0].created)
    assert past in offer().images and past not in offer().gone
    if newer:
        after = trainer.save(2)
        assert after is not None
        trainer.say(after[1])
    trainer.say(m.Revoked(step=1, created=past.created, reason="torn"))
    node.listen()
    said = offer()
    assert past in said.gone and past not in said.images
    assert all(one.step != 1 for one in said.settled)


def test_what_a_dirty_make_of_its_number_took_from_home_is_not_called_gone(node: Node) -> None:
    """A partner has it still, of a clean step: the run did not go back before it."""
    trainer = Trainer(node)
    trainer.lease()
    offer = offers_of(node)
    clean = trainer.save(1)
    assert clean is not None
    trainer.say(clean[1])
    node.listen()
    past = Past(1, clean[0].created)
    assert [one.step for one in offer().settled] == [1]
    berth = node.run.berths[0]
    berth.forget_step(1)
    berth.send(m.Spoiled(1, past.created + 1, 0, "another rank skipped it"))
    said = offer()
    assert not said.images and past not in said.gone and Past(1, past.created + 1) in said.gone
    assert Past(said.settled[0].step, said.settled[0].created) == past


def test_memory_for_other_nodes_sake_keeps_no_rank_from_saving(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, or its budget by now, has room for what was asked for and for no more."""
    monkeypatch.setattr(node.run, "lends", lambda *_: SLOTS + 2)
    node.budget.limit = (SLOTS + 1) * stride_of(LAYOUT)
    trainer = Trainer(node)
    trainer.lease()
    tier = node.run.berths[0].current
    assert tier is not None and tier.slots.count == SLOTS
    assert trainer.save(1) is not None
