"""The vaults of this node: one process a GPU, started when somebody first asks for its memory."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Protocol

from zerostall.telemetry import log, say_once
from zerostall.wire import lockers as w
from zerostall.wire.channel import Channel, ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.agent.loop_call import Post

_END_SECONDS = 10.0


class Renter(Protocol):
    """Who has a locker, or has asked for one. Called on the agent's loop."""

    def opened(self, opened: w.Opened) -> None: ...

    def declined(self, reason: str) -> None: ...

    def emptied(self, emptied: w.Emptied) -> None: ...

    def mirrored(self, order: int) -> None: ...

    def stuck(self, order: int, reason: str) -> None: ...

    def written(self, answer: w.Written | w.NotStraight | w.Stuck) -> None: ...

    def lost(self, reason: str) -> None:
        """The vault is gone, and all that was in it."""


class Vaults:
    """Driven by the agent's loop.

    Args:
        budget: most bytes that each lends; None: half of what its GPU has free.
    """

    def __init__(self, post: Post, budget: int | None) -> None:
        self._post = post
        self._budget = budget
        self._running: dict[str, _Process] = {}
        self._orders = itertools.count(1)

    def lend(self, gpu: str, request: w.Lend, renter: Renter) -> None:
        """Ask for a locker; `opened` or `declined` follows, or `lost`."""
        if self._budget == 0:
            self._post(lambda: renter.declined("ZEROSTALL_VAULT_BUDGET is 0"))
            return
        process = self._running.get(gpu)
        if process is None:
            process = self._running[gpu] = _Process(gpu, self._budget, self._post, self._ended, self._let_go)
        process.renters[request.key] = renter
        process.send(request)

    def take_back(self, gpu: str, key: int) -> None:
        """The locker is needed no longer; with the last one its vault goes."""
        process = self._running.get(gpu)
        if process is None or process.renters.pop(key, None) is None:
            return
        process.send(w.TakeBack(key=key))
        self._let_go(process)

    def show(self, gpu: str, message: w.Show, fd: int) -> None:
        """Have the vault map a segment of host memory."""
        if process := self._running.get(gpu):
            process.send(message, fd)

    def hide(self, key: int) -> None:
        """That segment goes."""
        for process in self._running.values():
            process.send(w.Hide(key=key))

    def write(self, gpu: str, order: w.Write, renter: Renter) -> None:
        """Have the vault write to a file; `written` follows, or `lost`."""
        if process := self._running.get(gpu):
            process.writes[order.id] = renter
            process.send(order)

    def show_file(self, gpu: str, key: int, fd: int) -> None:
        """A file that the vault will write to."""
        if process := self._running.get(gpu):
            process.send(w.ShowFile(key=key), fd)

    def hide_file(self, gpu: str, key: int) -> None:
        """The vault is through with it."""
        if process := self._running.get(gpu):
            process.send(w.HideFile(key=key))

    def order(self, gpu: str, order: w.Drain | w.Mirror, renter: Renter) -> None:
        """Have the vault empty or fill a place; `emptied`, `mirrored` or `stuck` follows, or `lost`."""
        if process := self._running.get(gpu):
            process.orders[order.id] = renter
            process.send(order)

    def drains(self) -> int:
        """How many places are being emptied or filled, or wait for that. Any thread."""
        return sum(len(process.orders) for process in list(self._running.values()))

    def end(self, gpu: str, reason: str) -> None:
        """It does nothing any more: end it; `lost` follows."""
        if process := self._running.get(gpu):
            process.end(reason)

    def next_order(self) -> int:
        return next(self._orders)

    def pids(self) -> dict[str, int]:
        """The vaults' processes, by GPU."""
        return {gpu: process.pid for gpu, process in self._running.items()}

    def close(self) -> None:
        for process in list(self._running.values()):
            process.renters.clear()
            process.close()
            process.join()

    def _let_go(self, process: _Process) -> None:
        """End a vault in which nobody has a locker."""
        if not process.renters:
            if self._running.get(process.gpu) is process:
                del self._running[process.gpu]
            process.close()

    def _ended(self, process: _Process, reason: str) -> None:
        if self._running.get(process.gpu) is process:
            del self._running[process.gpu]
        renters = list(process.renters.values())
        process.renters.clear()
        process.orders.clear()
        process.writes.clear()
        if renters:
            log.error("the vault of %s is gone, with all that was in it: %s", process.gpu, reason)
        for renter in renters:
            renter.lost(reason)


class _Process:
    """One vault. `renters` by their locker's key, `orders` and `writes` by number."""

    def __init__(
        self,
        gpu: str,
        budget: int | None,
        post: Post,
        ended: Callable[[_Process, str], None],
        declined: Callable[[_Process], None],
    ) -> None:
        self.gpu = gpu
        self.renters: dict[int, Renter] = {}
        self.orders: dict[int, Renter] = {}
        self.writes: dict[int, Renter] = {}
        self._post = post
        self._ended = ended
        self._declined = declined
        self._reason = ""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "zerostall.agent.vault"]
        command += ["--socket", str(theirs.fileno()), "--parent", str(os.getpid()), "--gpu", gpu]
        command += [] if budget is None else ["--budget", str(budget)]
        # The agent may have been started by a trainer that sees one GPU only.
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd="/"
            )
        self.pid = self._process.pid
        self._channel: Channel[w.FromVault] = Channel(ours, w.FromVault)
        self._thread = threading.Thread(target=self._listen, name=f"vault {gpu[-12:]}", daemon=True)
        self._thread.start()

    def send(self, message: w.ToVault, *fds: int) -> None:
        """Tell it; where it is gone, its end is told by itself."""
        try:
            self._channel.send(message, *fds)
        except ClosedError as error:
            log.info("vault %d: %s", self.pid, error)

    def close(self) -> None:
        self._channel.shut()

    def end(self, reason: str) -> None:
        self._reason = reason
        self._process.kill()

    def join(self) -> None:
        self._thread.join(_END_SECONDS)

    def _listen(self) -> None:
        try:
            while True:
                for message, _ in self._channel.receive():
                    self._post(lambda message=message: self._heard(message))
        except ClosedError as error:
            why = str(error.args[0])
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._channel.close()
        if code < 0 and not self._reason:
            why = f"process {self.pid} was ended by signal {-code}"
        self._post(lambda: self._ended(self, self._reason or why))

    def _heard(self, message: w.FromVault) -> None:
        match message:
            case w.Ready():
                log.info("vault %d: %s (%s), budget %d bytes", self.pid, self.gpu, message.name, message.budget)
            case w.Opened():
                if renter := self.renters.get(message.key):
                    renter.opened(message)
            case w.Declined():
                if renter := self.renters.pop(message.key, None):
                    renter.declined(message.reason)
                self._declined(self)
            case w.Emptied():
                if renter := self.orders.pop(message.id, None):
                    renter.emptied(message)
            case w.Mirrored():
                if renter := self.orders.pop(message.id, None):
                    renter.mirrored(message.id)
            case w.Written() | w.NotStraight():
                if renter := self.writes.pop(message.id, None):
                    renter.written(message)
            case w.Stuck() if renter := self.writes.pop(message.id, None):
                renter.written(message)
            case w.Stuck():
                if renter := self.orders.pop(message.id, None):
                    renter.stuck(message.id, message.reason)
            case w.Slow():
                say_once(f"vault {self.gpu}", "the vault of %s drains slowly: %s", self.gpu, message.reason)
            case w.Closed():
                self._reason = message.reason
