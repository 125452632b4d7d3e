"""The ranks that train together, as one of them sees it: which one it is, and how all of them agree.

Ranks agree through the store that `torch.distributed` keeps for them (each over a connection of its own), by one
exchange after another: no collective, so that nothing here gets in the way of one that training has under way, on
whatever backend. Every rank posts; rank 0 decides and posts one answer for all. A rank that fails posts its error
instead, and all raise it.

A store may outlive the ranks that wrote to it: torchrun's goes on, by default, through all restarts of its workers,
with all that was said before. So ranks first find those of their own attempt, by words that nobody has said before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from zerostall import config
from zerostall.core.agreement import Awaited
from zerostall.errors import AgentError, CapabilityError, RankError, StorageError, WaitTimeoutError, ZerostallError
from zerostall.telemetry import log, say_once
from zerostall.wire.messages import plain, rebuild_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_POLL = (0.001, 0.05)
"""First and longest pause of a rank that waits; every rank of a large world waits longer."""
_SAID_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_PULSE_SECONDS = 1.0
_NAMED = 16

_built: dict[str, int] = {}
"""How many worlds this process has built of each group: every rank builds them in the same order."""


class _Failure(msgspec.Struct, frozen=True):
    """An error that crosses to other ranks as one of the same class."""

    kind: str
    message: str
    hint: str = ""
    errno: int | None = None

    @classmethod
    def of(cls, error: ZerostallError) -> _Failure:
        number = error.errno if isinstance(error, StorageError) else None
        return cls(type(error).__name__, plain(str(error.args[0]) if error.args else str(error)), error.hint, number)


class _Post(msgspec.Struct, frozen=True):
    """What a rank says in an exchange, or rank 0 in answer to all."""

    what: str
    data: bytes = b""
    failure: _Failure | None = None


class World:
    """One rank among `size`. Every method that exchanges is for all ranks, in the same order, on one thread.

    Attributes:
        rank: this process, from 0.
        size: how many there are.
        patience: seconds without a sign of life after which a rank is given up.
    """

    def __init__(self, rank: int, size: int, store: Any = None, *, patience: float | None = None) -> None:
        self.rank = rank
        self.size = size
        self.patience = config.ranks_patience() if patience is None else patience
        self._store = store
        self._session = ""
        self._complete = False  # rank 0 has seen all others of this attempt
        self._exchange = 0

    @classmethod
    def alone(cls) -> World:
        """The world of one process."""
        return cls(0, 1)

    @classmethod
    def of(cls, process_group: Any = None) -> World:
        """The ranks of a process group (None: all of them), or this process alone where `torch.distributed` is not up.

        Raises:
            CapabilityError: this process is started as one of several and `torch.distributed` does not know it yet.
            ValueError: this process is not in the group.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            if process_group is not None:
                raise ValueError("process_group is given, but torch.distributed is not initialized")
            _refuse_uninitialized()
            return cls.alone()
        group = distributed.group.WORLD if process_group is None else process_group
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        if rank < 0:
            raise ValueError("this process is not in the process_group it gave")
        if size == 1:
            return cls.alone()
        name = "-".join(map(str, [group.group_name, *distributed.get_process_group_ranks(group)[:1], size]))
        number = _built[name] = _built.get(name, 0) + 1
        store = distributed.PrefixStore(f"zerostall/{name}/{number}", _default_store(distributed))
        return cls(rank, size, store)

    def aside(self, name: str) -> World:
        """The same ranks, for exchanges of their own on another thread; `name` is given once an attempt, on each."""
        if self._store is None:
            return self
        store = sys.modules["torch.distributed"].PrefixStore(f"{self._session}/{name}", _clone(self._store))
        return World(self.rank, self.size, store, patience=self.patience)

    def gather(self, data: bytes, *, what: str = "gather") -> list[bytes]:
        """What every rank gave, in the order of ranks. For little data: all of it goes to every rank.

        Raises:
            WaitTimeoutError: ranks are missing; names them.
            ZerostallError: what a rank failed with, naming it.
        """
        return msgspec.msgpack.decode(self.decide(data, msgspec.msgpack.encode, what=what), type=list[bytes])

    def decide(self, data: bytes, decision: Callable[[Sequence[bytes]], bytes], *, what: str) -> bytes:
        """Rank 0 decides from what every rank gave; all get what it decided, or raise what it raised.

        Args:
            data: what this rank gives.
            decision: called on rank 0 alone.
            what: what is exchanged, for messages: ranks that are at different points of the program find out.

        Raises: as `gather`.
        """
        if self._store is None:
            return decision([data])
        return self._run(_Post(what, data), decision)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What every rank does on its own: an error on one is raised on all, when all are through.

        Ranks that are through wait for those that are not for as long as these show signs of life.
        """
        with self.excused(what), self.pulse():
            yield
        self.decide(b"", lambda _: b"", what=what)

    @contextlib.contextmanager
    def excused(self, what: str) -> Iterator[None]:
        """An error in the block is posted to the next exchange, so that the other ranks need not wait for this one."""
        try:
            yield
        except ZerostallError as error:
            self._fail(what, error)
            raise
        except Exception as error:
            self._fail(what, RankError(repr(error)))
            raise

    # ----------------------------------------------------------------------------------------------- exchanges

    def _fail(self, what: str, error: ZerostallError) -> None:
        if self._store is None:
            return
        try:
            self._run(_Post(what, failure=_Failure.of(error)), lambda _: b"")
        except (ZerostallError, RuntimeError) as second:
            log.debug("%s: this rank's failure is known to all: %s", what, second)

    def _come(self, what: str) -> None:
        """Have rank 0 of this attempt name its session.

        Each says hello with a word of its own, and rank 0 answers under that word: neither can be of an attempt before.
        """
        word = secrets.token_hex(8)
        self._store.set(f"hello/{self.rank}", word)
        self._await([(0, f"welcome/{word}")], what)
        self._session = self._store.get(f"welcome/{word}").decode()
        self._store.set(f"{self._session}/here/{self.rank}", b"")

    def _receive(self, what: str) -> None:
        """Rank 0: have all others of this attempt come. A hello of one before gets an answer that nobody reads."""
        answered: dict[int, str] = {}

        def answer() -> None:
            for rank in range(1, self.size):
                if self._store.check([f"hello/{rank}"]):
                    word = self._store.get(f"hello/{rank}").decode()
                    if answered.get(rank) != word:
                        answered[rank] = word
                        self._store.set(f"welcome/{word}", self._session)

        here = {rank: f"{self._session}/here/{rank}" for rank in range(1, self.size)}
        self._await(list(here.items()), what, answer)
        self._complete = True
        for rank, key in here.items():
            for done in (key, f"hello/{rank}", f"welcome/{answered.get(rank, '')}"):
                self._store.delete_key(done)

    def _run(self, post: _Post, decision: Callable[[Sequence[bytes]], bytes]) -> bytes:
        try:
            if not self._session and self.rank == 0:
                self._session = secrets.token_hex(8)
            elif not self._session:
                self._come(post.what)
            self._exchange += 1
            prefix = f"{self._session}/{self._exchange}/"
            self._store.set(f"{prefix}{self.rank}", msgspec.msgpack.encode(post))
            if self.rank == 0:
                with self.pulse():
                    answer = self._answer(prefix, post.what, decision)
                self._store.set(f"{prefix}answer", msgspec.msgpack.encode(answer))
                self._forget(self._exchange - 2)
            else:
                self._await([(0, f"{prefix}answer")], post.what)
                answer = msgspec.msgpack.decode(self._store.get(f"{prefix}answer"), type=_Post)
        except (ZerostallError, msgspec.MsgspecError):
            raise
        except RuntimeError as error:  # what torch's stores raise, when the process that keeps one is gone
            raise AgentError(
                f"{post.what}: the store of torch.distributed cannot be reached: {str(error).splitlines()[0]}",
                hint="the process that keeps it (rank 0, or torchrun) has probably ended: its log says why",
            ) from error
        if answer.failure is not None:
            failure = answer.failure
            raise rebuild_error(failure.kind, failure.message, hint=failure.hint, errno=failure.errno)
        return answer.data

    def _answer(self, prefix: str, what: str, decision: Callable[[Sequence[bytes]], bytes]) -> _Post:
        """What rank 0 answers all; a failure, too, is an answer."""
        try:
            if not self._complete:
                self._receive(what)
            keys = [(rank, f"{prefix}{rank}") for rank in range(self.size)]
            self._await(keys, what)
            posts = [msgspec.msgpack.decode(data, type=_Post) for data in self._store.multi_get([k for _, k in keys])]
            for rank, post in enumerate(posts):
                if post.failure is not None:
                    message = f"rank {rank} of {self.size}: {post.failure.message}"
                    return _Post(what, failure=msgspec.structs.replace(post.failure, message=message))
            for rank, post in enumerate(posts):
                if post.what != what:
                    raise RankError(
                        f"rank {rank} is at {post.what!r} while rank 0 is at {what!r}",
                        hint="every rank makes the same calls in the same order",
                    )
            return _Post(what, data=decision([post.data for post in posts]))
        except ZerostallError as error:
            return _Post(what, failure=_Failure.of(error))

    def _await(self, keys: Sequence[tuple[int, str]], what: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for each rank's key for as long as it comes or its rank shows signs of life.

        Args:
            meanwhile: called again and again.

        Raises:
            WaitTimeoutError: neither for `patience` seconds; names the ranks.
        """
        pause, longest = _POLL
        longest += self.size / 20_000
        began = said = looked = time.monotonic()
        awaited = Awaited(began, self.patience)
        for position, (_, key) in enumerate(keys):
            while not self._store.check([key]):
                meanwhile()
                time.sleep(pause)
                pause = min(2 * pause, longest)
                now = time.monotonic()
                if now - looked < min(_LOOK_SECONDS + longest, self.patience / 4):
                    continue
                looked = now
                missing = [rank for rank, k in keys[position:] if not self._store.check([k])]
                late = awaited.late({rank: self._store.add(f"pulse/{rank}", 0) for rank in missing}, now)
                if late:
                    self._give_up(late, what)
                if missing and now - said > min(_SAID_SECONDS, self.patience / 4):
                    said = now
                    log.warning("%s: waiting for %s for %.0f s", what, _ranks(missing, self.size), now - began)

    def _give_up(self, late: list[int], what: str) -> NoReturn:
        raise WaitTimeoutError(
            f"{what}: nothing has been heard of {_ranks(late, self.size)} for {self.patience:.0f} s",
            hint="they have ended, hang, or do not make this call: every rank must. "
            "ZEROSTALL_RANKS_PATIENCE is how long they are waited for",
        )

    def _forget(self, exchange: int) -> None:
        """Every rank has read the answer of an exchange before the one before this."""
        if exchange < 1:
            return
        for key in [*range(self.size), "answer"]:
            self._store.delete_key(f"{self._session}/{exchange}/{key}")

    @contextlib.contextmanager
    def pulse(self) -> Iterator[None]:
        """Show the others that this rank is alive for as long as the block lasts."""
        if self._store is None:
            yield
            return
        store, over = _clone(self._store), threading.Event()

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # the block itself will find that the store is gone
                while not over.wait(min(_PULSE_SECONDS, self.patience / 8)):
                    store.add(f"pulse/{self.rank}", 1)

        thread = threading.Thread(target=beat, name="zerostall pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _ranks(ranks: Sequence[int], size: int) -> str:
    named = ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named} of {size}"


def _default_store(distributed: Any) -> Any:
    """The store of `torch.distributed`, over a connection of our own: a wait of ours never blocks one of training's."""
    return _clone(distributed.distributed_c10d._get_default_store())


def _clone(store: Any) -> Any:
    try:
        clone = store.clone()
    except (NotImplementedError, RuntimeError):  # a store within this process: there is no connection to wait for
        return store
    clone.set_timeout(timedelta(seconds=max(60.0, config.ranks_patience())))
    return clone


def _refuse_uninitialized() -> None:
    """One process of several must not be taken for all there is: its state would be saved as if it were everybody's.

    Reads `WORLD_SIZE` (torchrun, Kubernetes operators) and, for a warning only, Slurm's `SLURM_STEP_NUM_TASKS`: an
    `srun` may as well have started runs that have nothing to do with each other.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdecimal() and int(world) > 1:
        raise CapabilityError(
            f"WORLD_SIZE is {world}, but torch.distributed is not initialized",
            hint="call torch.distributed.init_process_group() before the Checkpointer is made, or unset WORLD_SIZE",
        )
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        say_once(
            "slurm",
            "this is one of %s tasks of a Slurm step and torch.distributed is not initialized: it is taken for a run "
            "of its own",
            tasks,
        )
