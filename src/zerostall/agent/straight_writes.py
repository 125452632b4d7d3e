"""Images that lie in a vault, too, and go from there straight to disk: the agent's side of it.

A place is kept only while a stretch is written from it: a capture that wants it gets it after that, and the rest of
the image comes from host memory.
"""

from __future__ import annotations

import queue
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from zerostall import config
from zerostall.core import gds
from zerostall.core.candidates import Past
from zerostall.core.places import gaps
from zerostall.telemetry import say_once
from zerostall.wire import lockers as w

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerostall.agent.locker import Answer, Locker
    from zerostall.agent.loop_call import Post
    from zerostall.agent.vaults import Vaults
    from zerostall.tiers.contract import Image, Pace
    from zerostall.tiers.host import Held, HostTier

STRETCH = 128 << 20
"""A disk takes that in a tenth of a second or less; for so long a place is kept, and whoever comes first waits."""
PATIENCE_SECONDS = 60.0
_NEWER = "its place was wanted for a newer one"
_LEAVES = "the agent leaves"


class StraightWrites:
    """Those of one rank. Driven by the agent's loop.

    Attributes:
        nbytes: what was written so, since the agent started.
        reason: why it is not done; empty while nothing is known to be against it.
    """

    def __init__(self, vaults: Vaults, lockers: Sequence[Locker], advance: Callable[[], None]) -> None:
        self.nbytes = 0
        self.reason = ""
        self._vaults = vaults
        self._lockers = lockers
        self._advance = advance
        self._off: set[str] = set()  # handles of lockers whose vault does not do it
        self._shown: dict[int, set[str]] = {}
        self._waiting: set[queue.SimpleQueue[str]] = set()
        self._closed = False

    def of(self, tier: HostTier, held: Held, post: Post) -> Image:
        """The image, with its copy on a device where it has one."""
        image, record = held.image, held.image.record
        if config.gds() == "off":
            self.reason = "switched off"
        elif self._place(Past(record.step, record.created), look=True) is not None:
            return replace(image, device=_Copy(self, tier, held, post))
        return image

    def words(self) -> str:
        """For who looks at the tier."""
        if self.nbytes:
            return f", {self.nbytes / 1e9:.3g} GB went straight to disk"
        return f", to disk through host memory: {self.reason}" if self.reason else ""

    def close(self) -> None:
        """Nobody waits any more: what is being written comes from host memory from here on."""
        self._closed = True
        for waiting in self._waiting:
            waiting.put(_LEAVES)

    # ------------------------------------------------------------------------------------------------- for a copy

    def begin(self, stretch: _Stretch, told: queue.SimpleQueue[str]) -> None:
        """Have a stretch written; `told` gets why that cannot be, or an empty word."""
        if self._closed or stretch.file.closed:
            told.put(_LEAVES)
            return
        found = self._place(stretch.past)
        if found is None:
            told.put(_NEWER)
            return
        locker, index, runs = found
        places, record = locker.places, stretch.held.image.record
        shown = self._shown.setdefault(stretch.key, set())
        if locker.gpu not in shown:
            shown.add(locker.gpu)
            self._vaults.show_file(locker.gpu, stretch.key, stretch.file.fileno())
        locker.show(stretch.tier)
        first, end = stretch.chunks
        begin, until = first * record.chunk_bytes, end * record.chunk_bytes
        handle = locker.handle

        def answered(answer: Answer) -> None:
            places.release(index)
            self._waiting.discard(told)
            match answer:
                case w.Written():
                    self.nbytes += until - begin
                    self.reason = ""
                    told.put("")
                case w.NotStraight():
                    self._off.add(handle.hex())
                    self.reason = answer.reason
                    if answer.fallback:
                        say_once("gds", "ZEROSTALL_GDS=on, but %s: saves go through host memory", self.reason)
                    told.put(_NEWER)
                case w.Stuck():
                    self.reason = answer.reason
                    told.put(answer.reason)
            if not self._closed:
                self._advance()  # its place may be wanted

        self._waiting.add(told)
        order = w.Write(
            id=self._vaults.next_order(),
            file=stretch.key,
            locker=locker.key,
            place=index,
            memory=stretch.tier.key,
            offset=stretch.held.offset,
            chunk_bytes=record.chunk_bytes,
            first=first,
            checksums=tuple(record.checksums[first:end]),
            missing=gaps(runs, begin, until),
        )
        locker.write(order, answered)

    def give_up(self, reason: str) -> None:
        """Ask the vaults of now for it no longer."""
        self.reason = reason
        self._off.update(locker.handle.hex() for locker in self._lockers)

    def end(self, key: int) -> None:
        """Nothing more goes to that file."""
        for gpu in self._shown.pop(key, ()):
            self._vaults.hide_file(gpu, key)

    def _place(self, past: Past, *, look: bool = False) -> tuple[Locker, int, tuple[tuple[int, int], ...]] | None:
        """Where the image is kept, from now on until it is released; not kept for longer if this is but a `look`."""
        for locker in self._lockers:
            if locker.handle and locker.handle.hex() not in self._off and (place := locker.places.hold(past)):
                if look:
                    locker.places.release(place.index)
                return locker, place.index, place.runs
        return None


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Chunks of one image (first, one past the last), and the file that they go to."""

    tier: HostTier
    held: Held
    past: Past
    key: int
    file: BinaryIO
    chunks: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Copy:
    """See `contract.DeviceCopy`."""

    writes: StraightWrites
    tier: HostTier
    held: Held
    post: Post

    def write(self, fd: int, where: Path, pace: Pace) -> int:
        record, key, done = self.held.image.record, secrets.randbits(62), 0
        whole, most = record.nbytes // record.chunk_bytes, max(1, STRETCH // record.chunk_bytes)
        past, reason = Past(record.step, record.created), ""
        try:
            # Another open file: cuFile wants flags of its own.
            with Path(f"/proc/self/fd/{fd}").open("r+b", buffering=0) as file:
                while done < whole and not reason:
                    pace.wait()
                    end = min(done + most, whole)
                    told: queue.SimpleQueue[str] = queue.SimpleQueue()
                    stretch = _Stretch(self.tier, self.held, past, key, file, (done, end))
                    self.post(lambda stretch=stretch, told=told: self.writes.begin(stretch, told))
                    reason = told.get(timeout=PATIENCE_SECONDS)
                    done = done if reason else end
        except queue.Empty:
            reason = f"the vault has not written it in {PATIENCE_SECONDS:.0f} s"
            self.post(lambda: self.writes.give_up(reason))
        except OSError as error:
            reason = str(error)
        self.post(lambda: self.writes.end(key))
        if reason and reason not in (_NEWER, _LEAVES):
            told_too = "; ".join(filter(None, [reason, gds.advice(reason)]))
            say_once(f"gds:{where}", "%s: written through host memory, not straight from a GPU: %s", where, told_too)
        return done
