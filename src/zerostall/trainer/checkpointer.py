"""`Checkpointer`: what a training script holds."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING

from zerostall.config import Frozen, IfExists, Policy, WhenBusy, runtime_dir
from zerostall.core.steps import step_number
from zerostall.native import FORKS
from zerostall.telemetry import Stats, log
from zerostall.trainer import restore as restoring
from zerostall.trainer.ear import Ear
from zerostall.trainer.estate import FLUSH_SECONDS, Estate, await_dropped, flush_newest
from zerostall.trainer.every import Every
from zerostall.trainer.joining import agree_on_run, agree_on_terms, hello_of, link_up
from zerostall.trainer.ledger import Ledger
from zerostall.trainer.link import Link
from zerostall.trainer.lockers import Lockers
from zerostall.trainer.mappings import Mappings
from zerostall.trainer.memory import Shelf
from zerostall.trainer.options import Options, insist_on_name, place_of, shapes_of
from zerostall.trainer.pace import Pace
from zerostall.trainer.preemption import Preemption, signal_numbers
from zerostall.trainer.saves import Saves
from zerostall.trainer.state import Asked, Choice, State
from zerostall.trainer.turn import Turn
from zerostall.trainer.world import World
from zerostall.wire import messages as m

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from zerostall.core.matching import Strict
    from zerostall.core.policy import Remote
    from zerostall.core.retention import Keep
    from zerostall.core.vaults import Peer
    from zerostall.trainer.saving import Saving

_HAND_OVER = "Checkpointer(where, model=model, optimizer=optimizer)"
_TELL_SECONDS = 1.0


class Checkpointer:
    """Saves and restores the state of one training run.

    >>> with Checkpointer("runs/gpt", model=model, optimizer=optimizer) as ckpt:
    ...     for step in range(ckpt.restore(), num_steps):
    ...         train_one_step(step)
    ...         ckpt.save(step + 1)

    `save` copies at once what forward and user code may change, hands the rest to threads, and returns. Before the
    optimizer changes a parameter, its guard makes sure that it has been read. The image lands in memory of the node's
    agent, which outlives this process and carries it to disk.

    Args:
        where: the run's folder, created when absent; or a URL (`s3://bucket/run`, or a `Remote`), and then nothing is
            written to disk: snapshots go from memory there.
        run: a name for the run. A folder that belongs to another name is refused.
        keep: how many steps to keep on disk, or a `Keep`.
        policy: what the guard does with chunks not read yet: "overlap" reads them now, "freeze" moves them aside if
            they are on a GPU, "flip" has optimizers of `zerostall.optim` leave them where they are (and does as
            "freeze" with others), "auto" chooses by what was measured and says so in the log and in `stats`.
        when_busy: "skip" counts and skips a save when no slot is free; "wait" waits, and lets no accepted save be
            replaced before it is on disk.
        slots: images of host memory; 3 lets saves go on while one is written to disk.
        freeze_bytes: most memory of a GPU that "freeze" may take, and in all that "flip" may.
        disk_interval: seconds from one write to disk to the next; the newest snapshot goes then. At once go: the last
            one when training ends or dies, one that is waited for or pinned, and every one with `when_busy="wait"`.
        rng: save Python's, NumPy's and torch's random generators too.
        only: patterns (`model.head`, `!model.base`) of what is saved and restored; the rest is left alone.
        frozen: "leave" leaves parameters that ask for no gradient out; a restore says so if the base is another one.
        expect_shapes: name → shape; another shape at a save is an error (a sharded parameter's empty placeholder, say).
        require_finite: patterns (`model.*`) of tensors in which NaN or infinity is an error: such a snapshot is thrown
            away, and no older one is evicted for it. Looked for in the background.
        source_checks: share of the chunks of which a CUDA device takes the checksum itself at `save`, compared with
            what arrives (`GhostError`); the sample goes round: with 0.01, every chunk in 100 saves.
        guard: "hooks" guards the given optimizers by themselves; "manual" says that *every* change of trainable
            parameters happens inside `with ckpt.guard():`.
        preempt: signals, `("SIGTERM",)` for instance, upon which all ranks save once more and `preempted` becomes true.
            The handler of before gets the signal after that; a second one ends the process at once.
        grace: seconds from the signal until what is saved by then goes to disk and the process ends.
        process_group: the ranks of `torch.distributed` that train together; None: all. Every one makes this
            checkpointer, restores and saves the same steps; only making and restoring wait for each other.
        peer: capture into the memory of another GPU first, where one can be reached: the guard is free several times
            sooner. The agent takes that memory within its ZEROSTALL_VAULT_BUDGET; where it cannot be had, it is said
            why, and state goes to host memory. `Peer(copies=2)`: with a mirror of each image on a second GPU.
        disks: folders on other disks, of this run alone, over which ranks' images are dealt beside `where` itself.
        remote: a URL that the run is carried to beyond its disk, or a `Remote`: how often, how many, how fast.
        **state: what to save, by name: modules, optimizers, anything with `state_dict` and `load_state_dict`, dicts and
            lists of tensors, arrays and plain values.

    Attributes:
        stats: counters and times, see `zerostall.telemetry.Stats`.

    Raises:
        StateError: some state could not be restored later; names it.
        StorageError: the folder cannot be written.
        RunBusyError: another live trainer has the folder.
        RunMismatchError: the folder belongs to another run.
        AgentError: the node's agent cannot be started.
        RankError: another rank was told something else, or failed.
        WaitTimeoutError: another rank is missing.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Remote,
        *,
        run: str | None = None,
        keep: int | Keep = 3,
        policy: Policy = "overlap",
        when_busy: WhenBusy = "skip",
        slots: int = 3,
        freeze_bytes: int = 1 << 30,
        disk_interval: float = 5.0,
        rng: bool = True,
        guard: str = "hooks",
        only: str | Sequence[str] | None = None,
        frozen: Frozen = "save",
        expect_shapes: Mapping[str, Sequence[int]] | None = None,
        require_finite: str | Sequence[str] | None = None,
        source_checks: float = 0.01,
        preempt: Sequence[str | int] = (),
        grace: float = 30.0,
        process_group: object = None,
        peer: bool | Peer = False,
        disks: Sequence[str | os.PathLike[str]] = (),
        remote: str | Remote | None = None,
        **state: object,
    ) -> None:
        self._world = World.of(process_group)
        place = place_of(where, remote)
        self._where = place.where
        with self._world.excused("Checkpointer(...)"):
            self._options = Options.checked(
                keep=keep,
                policy=policy,
                when_busy=when_busy,
                slots=slots,
                freeze_bytes=freeze_bytes,
                disk_interval=disk_interval,
                guard=guard,
                require_finite=require_finite,
                source_checks=source_checks,
                remote=place.remote,
                peer=peer,
                disks=disks,
                where=place.where,
            )
            insist_on_name(run)
            signals = signal_numbers(preempt, grace)
            self._state = State(
                state,
                rng=rng,
                user_guards=guard == "manual",
                choice=Choice.of(only, frozen, alone=self._world.size == 1),
                expected=shapes_of(expect_shapes),
                finite=self._options.require_finite,
                world=self._world,
            )
        nodes = agree_on_terms(self._world, self._where, self._options, run=run, rng=rng, guard=guard)
        if not state:
            log.warning("%s: no state was handed over, so nothing of a model is saved: %s", self._where, _HAND_OVER)
        self.stats = Stats()
        self._condition = threading.Condition()
        self._shelf = Shelf(self._condition)
        self._lockers = Lockers(self._options.peer)
        self._ledger = Ledger(self._where, self._condition, self.stats, place.tiers)
        self._pace = Pace(alone=self._world.size == 1)
        self._turn = Turn()
        begun = contextlib.ExitStack()  # lets go of what was begun, where Ctrl-C comes before all is

        def connect(nodes: m.Nodes | None) -> Link:
            hello = hello_of(self._world, self._where, self._options, run, nodes)
            ear = Ear(self._shelf, self._ledger, self._pace, self.stats, self._lockers, self._world.rank)
            return Link(runtime_dir(), hello, ear, lambda link: begun.callback(link.close))

        await_dropped(self._where)
        try:
            self._link = link_up(self._world, connect, nodes)
            self._begin(begun, partial(Preemption, signals, grace))
        except BaseException:
            begun.close()
            raise

    def _begin(self, begun: contextlib.ExitStack, preemption: Callable[..., Preemption]) -> None:
        """The agent has been found: take what this needs of the process."""
        self._pace.begin(agree_on_run(self._world, self._where, self._link.welcome))
        self._link.tell(m.Begin(epoch=self._pace.epoch), timeout=_TELL_SECONDS)
        self._ledger.found(self._link.welcome.steps)
        self._mappings = Mappings(self._options.copy_threads)
        self._saves = Saves(
            self._state,
            self._options,
            self._world,
            self._link,
            self._mappings,
            self._shelf,
            self._ledger,
            self._pace,
            self.stats,
            self._condition,
            self._lockers,
        )
        # As all that outlives a call, these do not know who made them.
        leave, flush = partial(self._saves.propose, leave=True), partial(flush_newest, self._ledger)
        self._estate = Estate(
            self._where,
            self._saves,
            self._ledger,
            self._link,
            self._lockers,
            self._shelf,
            self._mappings,
            preemption(leave, flush),
        )
        begun.callback(self._estate.shut)
        self._estate.begin()  # nothing of it was started before
        if (lent := self._link.welcome.memory) is not None:
            self._mappings.offer(lent.key, self._link.take_welcome_fd(), lent.nbytes)

    # --------------------------------------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        *,
        metric: float | None = None,
        pin: bool = False,
        if_exists: IfExists = "error",
        when_busy: WhenBusy | None = None,
    ) -> Saving:
        """Take a snapshot of everything as it is now, and return at once.

        Args:
            step: the number of finished training steps; what `restore` will return.
            metric: what this step is worth, for `Keep(best=...)`.
            pin: never evict this step.
            if_exists: a step that is there already is an "error", or "skip" it, or "replace" it.
            when_busy: "skip" or "wait", for this save alone. Say "wait" for the last one of a run.

        Raises:
            StepExistsError: the step is there, or would go behind a newer one.
            StateError: the state has come to hold something that could not be restored; names it.
            CapacityError: the agent's budget is too small for the state.
        """
        turn = self._turn
        if turn.closed or turn.forks != FORKS[0]:
            turn.require_open()
        with turn.lock:
            if turn.closed or turn.inside:
                turn.refuse("save")
            try:
                turn.inside = True
                saving = self._saves.save(step, metric, pin, if_exists, when_busy)
            except BaseException:
                self._saves.mend()
                raise
            finally:
                turn.inside = False
            return saving

    def every(self, *, steps: int | None = None, seconds: float | None = None) -> Every:
        """When to save: `due = ckpt.every(seconds=600)`, then `if due(step): ckpt.save(step)` after each step.

        True on the same steps on every rank. Seconds are counted on rank 0, by a clock that is never set; the step that
        is saved lies a little ahead, so that all ranks have heard of it. Also true for the last step before leaving.
        """
        decides = self._world.rank == 0
        saves = self._saves
        return Every(self._pace, saves.propose, saves.go_late, steps=steps, seconds=seconds, decides=decides)

    @property
    def preempted(self) -> bool:
        """Leave the loop: a signal of `preempt` has come to some rank, and the last step, the same on all, is saved."""
        return self._pace.left

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Wrap what changes saved tensors and is not a hooked optimizer's step; entering waits for their reading."""
        self._saves.guard.protect()
        yield

    # ------------------------------------------------------------------------------------------------ restore

    def restore(
        self,
        step: int | None = None,
        *,
        required: bool = False,
        only: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: Strict = True,
        prefixes: bool = False,
        meta_to: str | torch.device | None = None,
    ) -> int:
        """Put the newest clean snapshot back, in place, and return its step; 0 when nothing was saved yet.

        Everything is checked, names, shapes and dtypes both ways, before anything is written. A damaged copy is
        skipped with a line in the log; another copy of the same step is preferred to an older step. An explicit `step`
        never becomes another one. With many ranks every one calls it, and all restore the newest that each can get.

        Args:
            step: this very step.
            required: nothing saved is an error.
            only: patterns of names to restore, with all below them (`model`, `!model.head`); the rest stays as it is.
            rename: regular expressions over the names of this state → the names that were saved.
            strict: "stored" restores over what is there: all that is stored must find its place, the rest stays. False
                restores what fits and logs what was missing or left over.
            prefixes: ignore wrapper prefixes (`module.`, `_orig_mod.`) when names are compared.
            meta_to: device on which tensors of modules that are on the meta device get memory, if there is a snapshot.

        Raises:
            SnapshotNotFoundError: no such step; or nothing at all, when `required`.
            MismatchError: stored and present state differ; nothing was written.
            CorruptError: every copy is damaged.
        """
        asked = Asked(only=only, rename=rename, strict=strict, prefixes=prefixes, meta_to=meta_to)
        request = restoring.Request(None if step is None else step_number(step), required, asked)
        turn = self._turn
        turn.require_open()
        with turn.lock:
            if turn.closed or turn.inside:
                turn.refuse("restore")
            turn.inside = True
            try:
                return self._restore(request)
            finally:
                turn.inside = False

    def _restore(self, request: restoring.Request) -> int:
        self._saves.mend()
        self._saves.settle()
        source = restoring.Source(self._world, self._link, self._mappings, self._saves.devices, self._where)
        outcome = restoring.restore(source, self._state, request)
        self.stats.restored_from = outcome.tier
        self._ledger.resume(outcome.step, outcome.seen)
        self._pace.begin(self._pace.epoch + 1)
        self._link.tell(m.Begin(epoch=self._pace.epoch), timeout=_TELL_SECONDS)
        return outcome.step or 0

    # -------------------------------------------------------------------------------------------------- close

    def close(self, *, timeout: float = FLUSH_SECONDS) -> None:
        """Wait until the newest snapshot is where it is durable, then let go of the agent. Leaving `with` does this.

        That is on disk and, where the run has a remote tier, there too. A second call does nothing. Whatever this
        raises, the checkpointer is closed afterwards, and another one may take the folder. The agent lives on for a
        while and goes on with what it has.

        Args:
            timeout: seconds.

        Raises:
            StorageError, TornError, ...: the newest snapshot did not get there; or an older one had failed and nobody
                was told (no `wait` has raised it) and nothing newer has made it good.
            WaitTimeoutError, AgentError: it has not got there yet, or there is no agent to take it there.
        """
        turn = self._turn
        if turn.closed:
            return
        if turn.forks != FORKS[0]:
            turn.closed = True  # a forked child has none of the threads; the parent goes on
            return
        try:
            self._estate.flush(timeout)
        finally:
            turn.closed = True
            self._estate.shut()

    def __del__(self) -> None:
        estate = self.__dict__.get("_estate")  # not there when the making of it failed
        if estate is not None:
            estate.dropped()

    def __repr__(self) -> str:
        if "_estate" not in self.__dict__:
            return "<Checkpointer, not open>"  # its making failed
        return f"<Checkpointer of {self._where}: {'closed' if self._turn.closed else self._ledger}>"

    def __reduce__(self):
        raise TypeError("a Checkpointer has threads, memory and hooks in this process: it cannot be copied or pickled")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # noqa: BLE001 - the first error is the one to see
            log.error("while leaving because of %r: the newest snapshot did not get to disk: %s", error, second)
