"""The agent's one loop: it accepts connections, hands messages to the runs, and leaves when nobody needs it."""

from __future__ import annotations

import hashlib
import logging
import os
import selectors
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import zerostall
from zerostall.agent.client import Client, NodeClient
from zerostall.agent.rank_report import rank_report
from zerostall.agent.requests import Requests
from zerostall.agent.runs import Runs
from zerostall.agent.upkeep import Upkeep
from zerostall.agent.vaults import Vaults
from zerostall.core.placement import ImageId
from zerostall.errors import (
    AgentError,
    CapabilityError,
    FormatError,
    RunBusyError,
    StorageError,
    ZerostallError,
)
from zerostall.flow.budget import Budget
from zerostall.telemetry import log
from zerostall.tiers.files import real
from zerostall.tiers.urls import is_url
from zerostall.wire import messages as m
from zerostall.wire.channel import Channel, ClosedError, drop, peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.agent.berth import Berth
    from zerostall.agent.door import Door
    from zerostall.agent.elsewhere import Elsewhere
    from zerostall.agent.run import Run
    from zerostall.config import AgentSettings
    from zerostall.wire import cluster as w

_DOOR_SECONDS = 1.0


class Service:
    """Everything one agent does, on the thread that calls `serve`."""

    def __init__(self, settings: AgentSettings, door: Door) -> None:
        self._settings = settings
        self._door = door
        self._listener = door.listener
        self._selector = selectors.DefaultSelector()
        self._clients: dict[Client, tuple[Run, Berth] | None] = {}
        self._vaults = Vaults(self.post, settings.vault_budget)
        self.runs = Runs(Budget(settings.host_budget), self._vaults.drains, self.post, self._watch)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._started = time.monotonic()
        self._last_use = self._started
        self._looked = self._started
        self._leaving = False
        self.upkeep = Upkeep(self.runs, settings, self.post)
        self._requests = Requests(self._vaults, self.runs.reclaim, lambda: self.elsewhere, self.upkeep.doubt)
        self.stays = False  # also when nobody trains: the cluster counts on this node
        self.elsewhere: Elsewhere | None = None

    # ------------------------------------------------------------------------------------------------- the loop

    def serve(self, before_closing: Callable[[], None] = lambda: None) -> None:
        """Serve until idle for long enough, or told to stop."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        while not self._leaving:
            for key, events in self._selector.select(self._patience()):
                if isinstance(key.data, Client):
                    self._talk(key.data, events)
                else:
                    key.data()
            while self._inbox:
                self._inbox.popleft()()
            self.runs.advance()
            self._sweep()
            self._mind_the_door()
            if self._idle_too_long():  # never set to what it was before: a signal may have said it meanwhile
                self._leaving = True
        before_closing()
        self._close()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop's thread, soon. Any thread."""
        self._inbox.append(call)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the loop after this round. Any thread; safe in a signal handler."""
        self._leaving = True
        os.eventfd_write(self._wake, 1)

    def _patience(self) -> float:
        longest = max(0.05, min(_DOOR_SECONDS, self._settings.idle_seconds / 4))
        retry = self.runs.retry_in()
        return longest if retry is None else min(retry, longest)

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _mind_the_door(self) -> None:
        """Once in a while: can the agent still be found?"""
        if time.monotonic() - self._looked < _DOOR_SECONDS or self._door.displaced:
            return
        self._looked = time.monotonic()
        if self._door.check() or self._door.displaced:
            self._selector.unregister(self._listener)
        if self._door.listener is not self._listener:
            self._listener = self._door.listener
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("a connection was not accepted: %s", error)
            return
        pid, uid = peer(sock)
        if uid != os.geteuid():
            log.warning("a connection from user %d was refused", uid)
            sock.close()
            return
        sock.setblocking(False)
        client = Client(Channel(sock, m.FromTrainer), pid=pid)
        self._clients[client] = None
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, client)

    def _watch(self, client: NodeClient) -> None:
        """Serve the agent of another node, too."""
        self._clients[client] = None
        self._selector.register(client.channel.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)

    def _talk(self, client: Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for message, fds in client.channel.receive():
                    self._handle(client, message, fds)
            drained = client.channel.flush()
        except ClosedError as error:
            log.info("%s is gone: %s", client.name, error)
            client.broken = True
            return
        wanted = selectors.EVENT_READ if drained else selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.modify(client.channel.socket, wanted, client)

    def _handle(self, client: Client, message: m.FromTrainer, fds: list[int]) -> None:
        try:
            if isinstance(client, NodeClient):
                client.heard(message)
            else:
                self._dispatch(client, message, fds)
        except Exception as error:  # noqa: BLE001 - one connection's trouble must not end everybody's agent
            ours = _ours(error)
            request = getattr(message, "id", None)
            if request is None:
                log.warning("%s: %s was refused: %s", client.name, type(message).__name__, ours)
                client.broken = True  # an event cannot be answered: the trainer finds out by losing us
            else:
                client.send(m.Refused.of(request, ours))
        finally:
            drop(fds)

    def _sweep(self) -> None:
        """Undo what ended connections held; watch for room to write to the others."""
        for client in list(self._clients):
            if client.broken:
                self._part(client)
            elif not client.channel.flush_quietly():
                self._selector.modify(client.channel.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)

    def _part(self, client: Client) -> None:
        attached = self._clients.pop(client)
        self._selector.unregister(client.channel.socket)
        client.channel.close()
        client.release_fetched()
        if isinstance(client, NodeClient):
            client.parted()
        if attached:
            log.info("trainer %d of rank %d left %s", client.pid, attached[1].rank, attached[0].where)
            attached[0].detach(client)

    def _catch_up(self, client: Client) -> None:
        """Hear all that a connection has said, its end above all, before somebody else asks for its place."""
        while not client.broken and client.channel.pending():
            self._talk(client, selectors.EVENT_READ)
        if client.broken:
            self._part(client)

    def _idle_too_long(self) -> bool:
        busy = self.stays or any(not isinstance(client, NodeClient) for client in self._clients) or self.runs.busy()
        if busy:
            self._last_use = time.monotonic()
            return False
        return self._door.displaced or time.monotonic() - self._last_use > self._settings.idle_seconds

    def _close(self) -> None:
        log.info("leaving after %.0f s", time.monotonic() - self._started)
        self.upkeep.close()
        for client in self._clients:
            client.channel.close()
        self.runs.close()
        self._vaults.close()
        self._selector.close()
        os.close(self._wake)

    # ------------------------------------------------------------------------------------------------- messages

    def _dispatch(self, client: Client, message: m.FromTrainer, fds: list[int]) -> None:
        match message:
            case m.Hello():
                self._hello(client, message)
            case m.Status():
                client.send(self._report(message.id))
            case m.Stop():
                self._stop(client, message)
            case m.Doubted():
                self._doubted(message)
                client.send(m.Done(id=message.id))
            case _:
                attached = self._clients[client]
                if attached is None:
                    raise AgentError(f"{type(message).__name__} before Hello")
                self._requests.serve(client, *attached, message, fds)

    def _hello(self, client: Client, hello: m.Hello) -> None:
        if self._clients[client] is not None:
            raise AgentError("a second Hello")
        if hello.protocol != m.PROTOCOL:
            raise CapabilityError(
                f"the agent speaks protocol {m.PROTOCOL}, this trainer {hello.protocol}",
                hint="stop the old agent with `zerostall agent stop`",
            )
        where, url = self._place(hello)
        run = self.runs.at(where)
        if run is None:
            run = self.runs.open(where, hello.world, url)
            run.trickle.refused = partial(self._refused, run)
            run.fetches.damaged = partial(self._damaged, run)
        run.member = self.elsewhere is not None
        seat, elder = (hello.nodes.seat, hello.nodes.elder) if hello.nodes is not None else (True, None)
        if self.elsewhere is not None and elder is not None and elder.newest not in run.folder.disk.steps():
            self.elsewhere.expect(ImageId(elder.facts.run, hello.rank), elder.newest)
        if self.elsewhere is not None and not url and seat and elder is None and run.folder.blank():
            self.elsewhere.heir(
                m.plain(str(where))[-1000:], hello.run or "", lambda found: self._inherited(client, run, hello, found)
            )
        else:
            self._begin(client, run, hello)

    def _inherited(self, client: Client, run: Run, hello: m.Hello, found: w.Inherited) -> None:
        """The manager was asked which run an empty folder goes on with."""
        if client.broken or client not in self._clients:
            return
        log.log(logging.WARNING if found.run or found.wait else logging.INFO, "%s: %s", run.where, found.reason)
        run.heir = found if found.run else None
        try:
            self._begin(client, run, hello)
        except Exception as error:  # noqa: BLE001 - the trainer waits for an answer
            client.send(m.Refused.of(hello.id, _ours(error)))

    def _begin(self, client: Client, run: Run, hello: m.Hello) -> None:
        if not run.attached():
            run.sit(hello.nodes)
        carrier = run.carry_to(hello.remote)
        if run.outpost is not None:
            run.outpost.meet(lambda error: self._met(client, run, hello, error, needed=True))
        elif carrier is None or (carrier.met and run.attached()):
            self._welcome(client, run, hello)
        else:
            carrier.meet(lambda error: self._met(client, run, hello, error))

    def _place(self, hello: m.Hello) -> tuple[Path, str]:
        """The folder that a run is known by, and the URL that is its own where it has no disk."""
        text = os.fsdecode(hello.where)
        if is_url(text):
            name = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
            where, url = self._settings.runtime_dir / "urls" / name, text
        else:
            where, url = Path(text), ""
        if not where.is_absolute() or not 0 <= hello.rank < hello.world:
            raise FormatError(f"no rank {hello.rank} of {hello.world} at {hello.where!r}")
        return real(where), url

    def _met(
        self, client: Client, run: Run, hello: m.Hello, error: ZerostallError | None, *, needed: bool = False
    ) -> None:
        """The store was asked, or the seat. Without the store, a run goes on that has steps here; another might begin
        anew."""
        if client.broken or client not in self._clients:
            return
        try:
            if error is not None and (needed or not run.holds_some()):
                raise error
            trouble = f"{run.where}: the run goes on without its store, which is tried again: {error}" if error else ""
            if trouble:
                log.warning("%s", trouble)
            self._welcome(client, run, hello, trouble)
        except Exception as other:  # noqa: BLE001 - the trainer waits for an answer
            client.send(m.Refused.of(hello.id, _ours(other)))

    def _welcome(self, client: Client, run: Run, hello: m.Hello, trouble: str = "") -> None:
        where = run.where
        berth = run.berths.get(hello.rank)
        if berth is not None and berth.client is not None:
            self._catch_up(berth.client)
        if run.undrained.any() and not run.attached():  # what the trainer before has left is to be found
            run.undrained.when_none(lambda: self._met(client, run, hello, None))
            return
        berth = run.attach(client, hello)
        self._clients[client] = (run, berth)
        client.name = f"trainer {client.pid}"
        log.info("trainer %d is rank %d of %d at %s", client.pid, hello.rank, hello.world, where)
        welcome = m.Welcome(
            id=hello.id,
            pid=os.getpid(),
            run_id=run.folder.facts.run,
            steps=run.steps(),
            epoch=run.epoch,
            meeting=run.seat.meeting if run.seat else None,
            trouble=m.plain(trouble),
        )
        tier = berth.current
        if tier is None:
            client.send(welcome)
        else:
            lent = m.Lent(tier.key, tier.segment.nbytes)
            client.send(msgspec.structs.replace(welcome, memory=lent), tier.segment.fileno())

    def _refused(self, run: Run, rank: int, step: int, why: str) -> None:
        """What of a run's images the disk has not taken, since they are not what their records say, is doubted."""
        self.upkeep.doubt(ImageId(run.folder.facts.run, rank), step, why)

    def _damaged(self, run: Run, rank: int, step: int, why: str) -> None:
        """What vouches for an image on disk is damaged, and is made again if somebody has it. A reader's thread."""
        self.upkeep.mending.make_vouchers_good(ImageId(run.folder.facts.run, rank), step, why)

    def _doubted(self, message: m.Doubted) -> None:
        run = self.runs.at(real(Path(os.fsdecode(message.where))))
        if run is None or run.url:
            return
        for step, why in message.steps:
            for rank in sorted(run.here):
                image = ImageId(run.folder.facts.run, rank)
                self.upkeep.doubt(image, step, f"somebody who read it says: {m.plain(why)[:1000]}", disk=True)

    def _stop(self, client: Client, request: m.Stop) -> None:
        trainers = [other.pid for other, attached in self._clients.items() if attached is not None]
        if trainers and not request.force:
            raise RunBusyError(f"trainers {trainers} are attached", hint="end them first, or stop with --force")
        client.send(m.Done(id=request.id))
        self._leaving = True

    def _report(self, request: int) -> m.Report:
        ranks = [rank_report(run, berth) for run in self.runs for berth in run.berths.values()]
        return m.Report(
            id=request,
            pid=os.getpid(),
            version=zerostall.__version__,
            uptime=time.monotonic() - self._started,
            host_bytes=self.runs.budget.lent,
            host_budget=self.runs.budget.limit,
            ranks=tuple(ranks),
            fallbacks=m.Fallback.all(),
            upkeep=self.upkeep.report(),
        )


def _ours(error: Exception) -> ZerostallError:
    """What the other side is told of an error."""
    if isinstance(error, ZerostallError):
        return error
    if isinstance(error, ValueError):
        return FormatError(str(error))
    if isinstance(error, OSError):
        return StorageError(str(error), errno=error.errno)
    log.exception("a message could not be handled")
    return AgentError(f"the agent could not handle it: {error!r}", hint="the agent's log says more")
