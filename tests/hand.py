"""A trainer without torch, driven by hand, and what tests do to its agent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from images import HandMade, make_layout, record_of
from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.wire import messages as m
from zerostall.wire import rendezvous
from zerostall.wire.channel import Channel, ClosedError

LAYOUT = make_layout(3_000_000, 1001)
RULES = m.Rules(keep_last=3)

_open: list[Channel[m.FromAgent]] = []


class HandTrainer:
    """A trainer without torch: it says hello, borrows memory, and seals images made by hand."""

    def __init__(self, folder: Path, where: Path, **hello: object) -> None:
        self.folder = folder
        self.channel = rendezvous.connect_or_start(folder)
        _open.append(self.channel)
        self.channel.socket.settimeout(30)
        self.events: list[m.Message] = []
        fields = {"rank": 0, "world": 1, "rules": RULES, **hello}
        self.rank, self.world = int(str(fields["rank"])), int(str(fields["world"]))
        self.welcome = self.ask(m.Hello(id=1, protocol=m.PROTOCOL, pid=os.getpid(), where=os.fsencode(where), **fields))
        self.segment: native.Segment | None = None

    def ask(self, request: m.Message, *fds: int):
        answer, received = self.ask_for_memory(request, *fds)
        for fd in received:
            os.close(fd)
        return answer

    def ask_for_memory(self, request, *fds: int):
        self.channel.send(request, *fds)
        while True:
            for index, (message, received) in enumerate(self._receive()):
                if getattr(message, "id", None) == request.id:
                    if isinstance(message, m.Refused):
                        raise message.error()
                    return message, received

    def _receive(self):
        answers = []
        for message, fds in self.channel.receive():
            if getattr(message, "id", None) is None:
                self.events.append(message)
            else:
                if isinstance(message, m.Leased):
                    self.events.clear()  # what was granted before was of other memory
                answers.append((message, fds))
        return answers

    def lease(self, layout=LAYOUT, slots: int = 3) -> None:
        leased, fds = self.ask_for_memory(m.Lease(id=2, layout=layouts.encode(layout), slots=slots))
        self.segment = native.Segment.attach(fds[0], leased.memory.nbytes)
        os.close(fds[0])
        self.stride = leased.stride

    def hear(self, kind: type[m.Message], **fields: object):
        """The first event of that kind; the others stay to be heard."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                    self.events.remove(event)
                    return event
            self._receive()

    def seal(self, step: int, layout=LAYOUT, *, seed: int | None = None, **wish: object) -> HandMade:
        made, sealed = self.capture(step, layout, seed=seed, **wish)
        self.channel.send(sealed)
        return made

    def capture(
        self, step: int, layout=LAYOUT, *, seed: int | None = None, **wish: object
    ) -> tuple[HandMade, m.Sealed]:
        """An image in the slot that was granted, and what is to be said of it."""
        granted = self.hear(m.Granted)
        made = HandMade(layout, step, seed=seed)
        assert self.segment is not None
        self.segment.view(granted.slot * self.stride, layout.nbytes)[:] = made.bytes
        run = self.welcome.run_id
        record = manifests.encode_record(
            record_of(layout, made.bytes, step, run=run, created=made.created, rank=self.rank, world=self.world)
        )
        return made, m.Sealed(slot=granted.slot, record=record, grant=granted.number, **wish)

    def fetch(self, step: int, tier: str) -> bytes:
        fetched, fds = self.ask_for_memory(m.Fetch(id=5, step=step, tier=tier))
        segment = native.Segment.attach(fds[0], fetched.memory.nbytes)
        os.close(fds[0])
        data = bytes(segment.view(fetched.offset, layouts.decode(fetched.layout).nbytes))
        segment.close()
        self.channel.send(m.Release())
        return data

    def copies(self) -> set[tuple[int, str, bool]]:
        return {(c.step, c.tier, c.clean) for c in self.ask(m.Find(id=4)).copies}

    def leave(self) -> None:
        """Go, as a trainer that closes or ends: this process lives on, so it is said."""
        with contextlib.suppress(ClosedError):
            self.channel.send(m.Leave())
        self.channel.close()


def close_all() -> None:
    """Close every connection that was opened here."""
    while _open:
        _open.pop().close()


def visit(folder: Path) -> Channel[m.FromAgent] | None:
    """A bare connection, when an agent listens."""
    channel = rendezvous.connect(folder)
    if channel is not None:
        channel.socket.settimeout(30)
        _open.append(channel)
    return channel


def agent_report(folder: Path) -> m.Report:
    channel = visit(folder)
    assert channel is not None
    channel.send(m.Status(id=1))
    (report, _), *_ = channel.receive()
    channel.close()
    assert isinstance(report, m.Report)
    return report


def agent_pid(folder: Path) -> int:
    return agent_report(folder).pid


def kill_agent(folder: Path) -> None:
    pid = agent_pid(folder)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def wait_until(condition: Callable[[], object], seconds: float = 60.0, *, pause: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(pause)
