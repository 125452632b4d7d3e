"""What a closed checkpointer leaves behind: nothing that waits for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerostall
from training import train_step, training
from zerostall.config import Policy

pytestmark = pytest.mark.usefixtures("own_agent")


@pytest.fixture
def without_collector() -> Iterator[None]:
    training()  # torch imports some of its own then, and what it leaves knows whoever called
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("policy", ["overlap", "freeze"])
def test_what_was_saved_is_freed_with_its_last_reference(where: Path, without_collector: None, policy: Policy) -> None:
    model, optimizer = training()
    ckpt = zerostall.Checkpointer(where, policy=policy, model=model, optimizer=optimizer)
    due = ckpt.every(steps=2)
    for step in range(ckpt.restore(), 4):
        train_step(model, optimizer, step)
        if due(step + 1):
            saving = ckpt.save(step + 1, when_busy="wait")
    assert ckpt.restore() == 4
    ckpt.close()
    seen = [weakref.ref(one) for one in (ckpt, ckpt._saves, ckpt._state, ckpt._ledger, model, optimizer)]
    del ckpt, due, model, optimizer
    assert [one() for one in seen[:3]] == [None] * 3
    assert [one() for one in seen[4:]] == [None] * 2
    saving.wait("disk")  # it knows how it ended
    del saving
    assert seen[3]() is None
