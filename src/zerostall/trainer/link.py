"""The training process's connection to its agent: it comes back by itself when the agent dies.

One thread receives. Requests are answered on the thread that asked; events go to the listener, on the link's thread.
When the agent is gone, the link finds or starts another, says hello, and has the listener hand over the memory it kept.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import msgspec

from zerostall.core import backoff
from zerostall.errors import AgentError, WaitTimeoutError, ZerostallError
from zerostall.telemetry import log
from zerostall.trainer import interrupts
from zerostall.wire import messages as m
from zerostall.wire.channel import Channel, ClosedError, drop, peer
from zerostall.wire.rendezvous import connect_or_start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

ANSWER_SECONDS = 600.0
_GREETINGS = 6
_HELLO_SECONDS = 60.0
_UP_SECONDS = 60.0

_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_all() -> None:
    for link in list(_links):
        link.forget()
    _links.clear()


os.register_at_fork(after_in_child=_forget_all)

Answer = tuple[m.FromAgent, list[int]]


class Listener(Protocol):
    """Who hears events, on the link's thread. Must not block and must not send requests."""

    def heard(self, event: m.FromAgent) -> None: ...

    def adoption(self) -> tuple[m.Adopt, int] | None:
        """What a new agent should take over: the message (its id is filled in) and the segment's descriptor."""
        ...

    def not_adopted(self) -> None:
        """The new agent has refused the memory: it holds nothing that counts any more."""
        ...

    def reconnected(self) -> Sequence[m.Message]:
        """There is another agent: what it must be told at once."""
        ...


class Link:
    """A connection that outlives agents.

    `begun` is told of it before there is anything to close: however making it ends, `close` may follow.

    Raises (on construction): AgentError when no agent can be had, and whatever it refuses `hello` with.
    """

    def __init__(
        self, folder: Path, hello: m.Hello, listener: Listener, begun: Callable[[Link], object] | None = None
    ) -> None:
        self._folder = folder
        self._hello = hello
        self._listener = listener
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._closed = False
        _links.add(self)
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="zerostall link", daemon=True)
        self._greeted = False
        if begun is not None:
            begun(self)
        self._channel, self.welcome, self._welcome_fd = self._greet()
        self._greeted = True
        self._up.set()
        self._thread.start()

    def take_welcome_fd(self) -> int:
        """The descriptor of the memory that `welcome` tells of, once: it is the caller's from now on."""
        fd, self._welcome_fd = self._welcome_fd, -1
        return fd

    def up(self) -> bool:
        """Is there an agent at the other end, as far as is known?"""
        return self._up.is_set()

    def tell(self, message: m.Message, timeout: float | None = None) -> bool:
        """Send an event, waiting for an agent while there is none; False when it was not sent.

        An agent may hear an event twice (once by adoption): it takes the second for what it is.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if left <= 0:
                return False
            if not self._up.wait(left):
                continue
            try:
                with self._lock:
                    self._send(message)
                return True
            except ClosedError:
                continue
        return False

    def ask(self, make: Callable[[int], m.Message], *, timeout: float = ANSWER_SECONDS) -> Answer:
        """Send a request and wait for its answer, together with the descriptors that came beside it.

        `make` is given the number that the request must carry as its id.

        Raises:
            AgentError: there is no agent, or it died while it was asked. Asking again is safe.
            WaitTimeoutError: no answer in time.
            ZerostallError: what the agent refused it with.
        """
        if not self._up.wait(min(timeout, _UP_SECONDS)):
            raise AgentError("there is no agent to ask", hint="see the agent's log; `zerostall agent status`")
        number = next(self._numbers)
        future: Future[Answer] = Future()
        with self._lock:
            self._waiting[number] = future
            try:
                self._send(make(number))
            except BaseException:
                self._waiting.pop(number, None)  # it may have been answered all the same
                raise
        try:
            answer, fds = future.result(timeout)
        except BaseException as error:
            future.add_done_callback(_unwanted)  # it may be there, or come just now: with it gigabytes may be held
            if isinstance(error, TimeoutError):
                raise WaitTimeoutError(f"the agent did not answer in {timeout:.0f} s") from None
            raise
        finally:
            self._waiting.pop(number, None)
        if isinstance(answer, m.Refused):
            drop(fds)
            raise answer.error()
        return answer, fds

    def _send(self, message: m.Message) -> None:
        """Caller holds the lock, so that another channel cannot take the broken one's place before that is noted."""
        try:
            self._channel.send(message)
        except ClosedError:
            self._up.clear()  # the link's thread will notice by itself
            raise

    def forget(self) -> None:
        """In a forked child: the connection is the parent's, so only close our copy of the descriptor."""
        self._closed = True
        self._channel.socket.close()

    def close(self) -> None:
        self._closed = True
        if not self._greeted:
            return
        drop([self.take_welcome_fd()])
        self._say_leave()
        self._channel.shut()  # not under the lock: whoever holds it may be waiting for an agent that does not read
        if interrupts.ended(self._thread, 5.0):
            self._channel.close()

    def _say_leave(self) -> None:
        """Else the agent waits for this trainer to come back. One that does not read is not waited for."""
        if not self._lock.acquire(timeout=0.1):
            return
        try:
            writable = select.poll()
            writable.register(self._channel.socket, select.POLLOUT)
            if self._up.is_set() and writable.poll(0):
                self._channel.send(m.Leave())
        except (ClosedError, OSError, ValueError):
            pass  # there is no connection to leave
        finally:
            self._lock.release()

    # ---------------------------------------------------------------------------------------------- the thread

    def _greet(self) -> tuple[Channel[m.FromAgent], m.Welcome, int]:
        """Connect and say hello. Only while nobody else uses the channel.

        An agent that is just leaving may take a connection and drop it: then there is another to be had.
        """
        for attempt in range(_GREETINGS):
            channel = connect_or_start(self._folder)
            try:
                welcome, fds = _exchange(channel, self._hello)
                assert isinstance(welcome, m.Welcome)
                if welcome.meeting is not None and (nodes := self._hello.nodes) is not None:
                    # The next agent must be where other nodes know this one to be.
                    nodes = msgspec.structs.replace(nodes, meeting=welcome.meeting)
                    self._hello = msgspec.structs.replace(self._hello, nodes=nodes)
                if welcome.trouble:
                    log.warning("%s", welcome.trouble)
                return channel, welcome, fds[0] if fds else -1
            except ClosedError:
                channel.close()
                if attempt == _GREETINGS - 1:
                    raise
                time.sleep(0.05 * 2**attempt)
            except BaseException:
                channel.close()
                raise
        raise AssertionError("unreachable")

    def _listen(self) -> None:
        while not self._closed:
            try:
                for message, fds in self._channel.receive():
                    self._deliver(message, fds)
            except ClosedError as error:
                if not self._closed:
                    self._recover(error)
        self._fail_waiting("this checkpointer is closed")
        self._channel.close()

    def _deliver(self, message: m.FromAgent, fds: list[int]) -> None:
        number = getattr(message, "id", None)
        if number is None:
            drop(fds)
            self._listener.heard(message)
            return
        future = self._waiting.pop(number, None)
        if future is None:
            drop(fds)
        else:
            if isinstance(message, m.Leased):
                self._listener.heard(message)  # in order with the grants around it
            future.set_result((message, fds))

    def _recover(self, error: ClosedError) -> None:
        """Find or start another agent and hand over the memory; tries until it works or the link is closed."""
        self._up.clear()
        self._channel.shut()  # a child that was forked may hold the socket, too
        log.warning("the agent is gone (%s); training goes on, another is being found", error)
        self._channel.close()
        self._fail_waiting("the agent died while it was asked")
        failures = 0
        while not self._closed:
            try:
                channel, self.welcome, fd = self._greet()
                drop([fd])  # what memory there is, this process has mapped already
                self._hand_over(channel)
            except (ZerostallError, OSError) as problem:
                failures += 1
                wait = backoff.pause(failures, 0.5)
                log.error("no agent (%s); trying again in %.1f s", problem, wait)
                time.sleep(wait)
                continue
            with self._lock:
                self._channel = channel
                self._up.set()
            log.warning("agent %d has taken over", self.welcome.pid)
            for message in self._listener.reconnected():
                self.tell(message, timeout=1.0)
            return

    def _hand_over(self, channel: Channel[m.FromAgent]) -> None:
        adoption = self._listener.adoption()
        if adoption is None:
            return
        message, fd = adoption
        try:
            _exchange(channel, message, fd)
        except ClosedError:
            raise
        except ZerostallError as refusal:
            log.error("the new agent does not take over the memory: %s; the next save borrows other memory", refusal)
            self._listener.not_adopted()

    def _fail_waiting(self, why: str) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(AgentError(why))


def _unwanted(future: Future[Answer]) -> None:
    """Nobody waits for the answer any more."""
    if future.exception() is None:
        drop(future.result()[1])


def _exchange(channel: Channel[m.FromAgent], request: m.Message, *fds: int) -> Answer:
    """Send a request and wait for its answer on a channel that nobody else reads.

    What comes before and right behind the answer is for the link's thread.
    """
    channel.send(request, *fds)
    wanted = getattr(request, "id")  # noqa: B009 - every request has one; the base class does not
    deadline = time.monotonic() + _HELLO_SECONDS
    others: list[tuple[m.FromAgent, list[int]]] = []
    while channel.pending(deadline - time.monotonic()):
        messages = channel.receive()
        for number, (message, received) in enumerate(messages, 1):
            if getattr(message, "id", None) != wanted:
                drop(received)  # an event has none
                others.append((message, []))
                continue
            channel.keep(others + messages[number:])
            if isinstance(message, m.Refused):
                raise message.error()
            return message, received
    pid, _ = peer(channel.socket)
    raise AgentError(
        f"the agent, process {pid}, has not answered for {_HELLO_SECONDS:.0f} s",
        hint="its log may say why; end it with kill -9, and another one starts",
    )
