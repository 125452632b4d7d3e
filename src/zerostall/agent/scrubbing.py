"""Copies that nobody fetches are checked once more, chunk by chunk, at a low rate and only while nothing else goes on.

Of each rank only the newest image is looked at: any other is about to be replaced, and holding it, be it for
milliseconds, could be in the way of that.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from zerostall.core import scrubbing
from zerostall.core.scrubbing import Resident
from zerostall.errors import SnapshotNotFoundError, ZerostallError
from zerostall.telemetry import log

if TYPE_CHECKING:
    from zerostall.agent.copies import Copies, Copy
    from zerostall.agent.doubt import Doubt
    from zerostall.flow.governor import Governor

_IDLE_SECONDS = 1.0


class Scrubbing:
    """One thread, none where the rate is 0.

    Attributes:
        rate: most bytes a second.
        checked: bytes, since the agent started.
        reason: why it rests just now; "" while it works.
    """

    def __init__(self, copies: Copies, governor: Governor, doubt: Doubt, rate: int) -> None:
        self.rate = rate
        self.checked = 0
        self.reason = "off" if not rate else "nothing is in memory yet"
        self._copies = copies
        self._governor = governor
        self._doubt = doubt
        self._seen: dict[str, float] = {}
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
                while not self._stopping.is_set() and (copy := self._next()) is not None:
                    self._scrub(copy)
                    self._seen[_name(copy)] = time.monotonic()
            except SnapshotNotFoundError:
                pass  # it made room while it was looked at
            except ZerostallError as error:
                log.debug("copies are not looked at just now: %s", error.args[0])
            except Exception:  # noqa: BLE001 - one image's trouble must not end the others
                log.exception("copies could not be looked at")

    def _next(self) -> Copy | None:
        found = {_name(copy): copy for copy in self._copies.all() if copy.newest and not copy.damaged}
        self._seen = {name: at for name, at in self._seen.items() if name in found}
        residents = [Resident(copy.record.created, name) for name, copy in found.items()]
        chosen = scrubbing.longest_unseen(residents, self._seen)
        if chosen is None:
            self.reason = "nothing is in memory"
        return found[chosen.name] if chosen else None

    def _scrub(self, copy: Copy) -> None:
        for chunk in range(copy.chunks):
            while (pause := scrubbing.pause(self._governor.traffic(), self.rate)).seconds:
                self.reason = pause.reason
                if self._stopping.wait(pause.seconds):
                    return
            self.reason = ""
            if not self._copies.sound(copy, chunk):
                self._doubt(copy.image, copy.step, f"found while nobody asked for it, at chunk {chunk}")
                return
            nbytes = copy.extent(chunk)[1]
            self.checked += nbytes
            if self._stopping.wait(scrubbing.after(nbytes, self.rate)):
                return


def _name(copy: Copy) -> str:
    return f"{copy.image.run}/{copy.image.rank}/{copy.step}/{copy.record.created!r}/{copy.tier}/{copy.memory.key}"
