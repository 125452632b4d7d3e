"""Copies that nobody fetches are checked once more, chunk by chunk, at a low rate and only while nothing else goes on.

Of each rank only the newest image in memory is looked at: any other is about to be replaced, and holding it, be it for
milliseconds, could be in the way of that. On disk all are, of this node's ranks, with what vouches for them.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from zerostall.agent.copies import Copy
from zerostall.core import scrubbing
from zerostall.core.scrubbing import Resident
from zerostall.errors import FormatError, SnapshotNotFoundError, ZerostallError
from zerostall.telemetry import log

if TYPE_CHECKING:
    from zerostall.agent.copies import Copies
    from zerostall.agent.disk_copies import DiskCopies, DiskCopy, DiskResident
    from zerostall.agent.doubt import Doubt
    from zerostall.flow.governor import Governor

_IDLE_SECONDS = 1.0


class Scrubbing:
    """One thread, none where the rate is 0.

    Args:
        rest: seconds from one check of an image on disk to the next.

    Attributes:
        rate: most bytes a second.
        checked: bytes, since the agent started.
        reason: why it rests just now; "" while it works.
    """

    def __init__(
        self, copies: Copies, disks: DiskCopies, governor: Governor, doubt: Doubt, rate: int, rest: float
    ) -> None:
        self.rate = rate
        self.checked = 0
        self.reason = "off" if not rate else "there is nothing yet"
        self._copies = copies
        self._disks = disks
        self._rest = rest
        self._governor = governor
        self._doubt = doubt
        self._seen: dict[str, float] = {}
        self._met: dict[str, float] = {}  # images in memory
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._scrub_for_ever, name="scrubbing", daemon=True)
        if rate:
            self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self.rate:
            self._thread.join(2.0)

    def _scrub_for_ever(self) -> None:
        while not self._stopping.wait(_IDLE_SECONDS):
            try:
                while not self._stopping.is_set() and (found := self._next()) is not None:
                    name, chosen = found
                    self._seen[name] = time.monotonic()
                    if (copy := self._opened(chosen)) is not None:
                        self._scrub(copy)
                    self._seen[name] = time.monotonic()
            except SnapshotNotFoundError:
                pass  # it made room while it was looked at
            except ZerostallError as error:
                log.debug("copies are not looked at just now: %s", error.args[0])
            except Exception:  # noqa: BLE001 - one image's trouble must not end the others
                log.exception("copies could not be looked at")

    def _next(self) -> tuple[str, Copy | DiskResident] | None:
        memory = {_name(copy): copy for copy in self._copies.all() if copy.newest and not copy.damaged}
        disks = {resident.name: resident for resident in self._disks.residents()}
        found: dict[str, Copy | DiskResident] = {**memory, **disks}
        self._seen = {name: at for name, at in self._seen.items() if name in found}
        now = time.monotonic()
        self._met = {name: self._met.get(name, now) for name in memory}
        residents = [Resident(copy.record.created, name, met=self._met[name]) for name, copy in memory.items()]
        residents += [Resident(one.committed, name, self._rest) for name, one in disks.items()]
        chosen = scrubbing.longest_unseen(residents, self._seen, now)
        if chosen is None:
            self.reason = "all that is there was looked at, or is fresh" if found else "nothing is there"
        return (chosen.name, found[chosen.name]) if chosen else None

    def _opened(self, chosen: Copy | DiskResident) -> Copy | DiskCopy | None:
        """What is to be read; of an image on disk for which nothing vouches any more that is said, and no more."""
        if isinstance(chosen, Copy):
            return chosen
        try:
            return self._disks.checked(chosen)
        except FormatError as error:
            self._doubt(chosen.image, chosen.step, f"found while nobody asked for it: {error.args[0]}", disk=True)
            return None

    def _scrub(self, copy: Copy | DiskCopy) -> None:
        for chunk in range(copy.chunks):
            while (pause := scrubbing.pause(self._governor.traffic(), self.rate)).seconds:
                self.reason = pause.reason
                if self._stopping.wait(pause.seconds):
                    return
            self.reason = ""
            if not copy.sound(chunk):
                why = f"found while nobody asked for it, at chunk {chunk}"
                self._doubt(copy.image, copy.step, why, disk=copy.tier == "disk")
                return
            nbytes = copy.record.extent(chunk)[1]
            self.checked += nbytes
            if self._stopping.wait(scrubbing.after(nbytes, self.rate)):
                return


def _name(copy: Copy) -> str:
    return f"{copy.image.run}/{copy.image.rank}/{copy.step}/{copy.record.created!r}/{copy.tier}/{copy.memory.key}"
