"""A trainer and its agent, both driven by hand in one process, message by message."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from images import HandMade, make_layout, record_of
from zerostall import native
from zerostall.agent.client import Client
from zerostall.agent.requests import Requests
from zerostall.agent.run import Run
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.flow.budget import Budget
from zerostall.flow.governor import Governor
from zerostall.telemetry import Stats
from zerostall.trainer.ear import Ear
from zerostall.trainer.ledger import Ledger
from zerostall.trainer.lockers import Lockers
from zerostall.trainer.memory import Memory, Shelf
from zerostall.trainer.pace import Pace
from zerostall.trainer.saving import Desk, Saving
from zerostall.wire import messages as m
from zerostall.wire.channel import Channel

LAYOUT = make_layout(5000, 11)
SLOTS = 2


class Node:
    """The agent's side: one run, and what its writer has to say waits until it is listened to. No vaults if none are
    given.
    """

    def __init__(self, where: Path, vaults: Any = None) -> None:
        self.said: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.budget = Budget(1 << 30)
        self.run = Run(where, 1, self.budget, native.Pool("test", 1), self.said.put, Governor())
        unused: Any = SimpleNamespace()
        self._requests = Requests(vaults or unused, lambda: False, lambda: None, unused)
        self.client: Client | None = None
        self._channels: list[Channel[Any]] = []

    def welcome(self) -> Channel[m.FromAgent]:
        """A trainer comes; its end of the connection, which is attached."""
        ours, theirs = socket.socketpair()
        self.client = Client(Channel(ours, m.FromTrainer), pid=os.getpid())
        rules = m.Rules(keep_last=100, disk_interval=3600.0)
        hello = m.Hello(1, m.PROTOCOL, os.getpid(), os.fsencode(self.run.where), 0, 1, rules)
        self.run.attach(self.client, hello)
        self.run.advance()
        self._channels += [self.client.channel, Channel(theirs, m.FromAgent)]
        return self._channels[-1]

    def listen(self) -> None:
        """Hear all that the trainer has said."""
        client, run = self.client, self.run
        assert client is not None
        while client.channel.pending():
            for message, fds in client.channel.receive():
                self._requests.serve(client, run, run.berths[0], message, fds)
                run.advance()
                for fd in fds:
                    os.close(fd)
        self.check()

    def lose(self) -> None:
        """The connection broke."""
        assert self.client is not None
        self.client.channel.close()
        self.run.detach(self.client)
        self.client = None

    def write(self) -> None:
        """Wait until nothing is on its way to disk any more, and heed each step that got there."""
        self.run.advance()
        while self.run.trickle._untidy > 0:
            self.said.get(timeout=60)()
            self.run.advance()
        self.check()

    def check(self) -> None:
        """No memory has two tables of slots."""
        tiers = self.run.berths[0].tiers()
        memories = {os.fstat(tier.segment.fileno()).st_ino for tier in tiers}
        assert len(memories) == len(tiers)
        assert self.budget.lent == sum(tier.segment.nbytes for tier in tiers)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.run.close()


class Trainer:
    """The trainer's side, as far as it has to do with what is said."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.condition = threading.Condition()
        self.shelf = Shelf(self.condition)
        self.ledger = Ledger(node.run.where, self.condition, Stats())
        self.lockers = Lockers(None)
        self.ear = Ear(self.shelf, self.ledger, Pace(alone=True), Stats(), self.lockers, 0)
        self.desk = Desk(self.condition, self.ledger.tiers)
        self.channel = node.welcome()

    def say(self, *messages: m.Message) -> None:
        for message in messages:
            self.channel.send(message)

    def hear(self) -> None:
        while self.channel.pending():
            for message, fds in self.channel.receive():
                if isinstance(message, m.Leased):
                    self.ear.heard(message)
                    self.shelf.install(self._memory(message, native.Segment.attach(fds[0], message.memory.nbytes)))
                elif not isinstance(message, m.Done):
                    self.ear.heard(message)
                for fd in fds:
                    os.close(fd)

    def _memory(self, leased: m.Leased, segment: native.Segment) -> Memory:
        return Memory(LAYOUT, layouts.encode(LAYOUT), segment, leased.stride, leased.slots)

    def lease(self) -> None:
        self.say(m.Lease(id=2, layout=layouts.encode(LAYOUT), slots=SLOTS))
        self.node.listen()
        self.hear()

    def save(self, step: int) -> tuple[Saving, m.Sealed] | None:
        """The save, and what the agent is to be told of it; None when no slot is free."""
        with self.condition:
            slot = self.shelf.take()
        if slot is None:
            return None
        made = HandMade(LAYOUT, step)
        saving = Saving(step, self.desk, made.created)
        self.ledger.accept(saving)
        memory = self.shelf.memory
        assert memory is not None
        memory.segment.view(slot * memory.stride, LAYOUT.nbytes)[:] = made.bytes
        run = self.node.run.folder.facts.run
        record = record_of(LAYOUT, made.bytes, step, run=run, created=made.created)
        sealed = m.Sealed(slot=slot, record=manifests.encode_record(record))
        return saving, self.shelf.sealed(step, sealed)

    def wait_for(self, saving: Saving) -> m.Promise:
        assert self.ledger.urge(saving, "disk")
        return m.Promise(step=saving.step, created=saving.created)

    def come_back(self) -> list[m.Message]:
        """Be welcomed anew, and hand over what is held; what the agent is to be told next, but is not told yet."""
        self.channel.close()
        self.channel = self.node.welcome()
        if (adoption := self.ear.adoption()) is not None:
            message, fd = adoption
            self.channel.send(message, fd)
            self.node.listen()
            self.hear()
        return self.ear.reconnected()
