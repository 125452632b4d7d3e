"""Which of several managers serves: the one whose lease holds the leader's key in etcd.

The lease is renewed on a thread of its own. Who could not renew it for its whole time has lost it, by its own steady
clock, before another can have it; and whatever a leader stores is stored only while the key is still its own.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from zerostall.errors import StorageError
from zerostall.manager.etcd import Etcd, Put
from zerostall.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerostall.manager.etcd import Place

LEASE_SECONDS = 5
_RENEWALS = 4
"""In the time of a lease."""


class Leadership:
    """Won: this process leads until `lost` is called, from the thread that renews, or until `resign`."""

    def __init__(self, etcd: Etcd, lease: str, revision: int, until: float, lost: Callable[[], object]) -> None:
        self.revision = revision
        self._etcd = etcd
        self._lease = lease
        self._until = until
        self._lost = lost
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, name="lease", daemon=True)
        self._thread.start()

    @property
    def key(self) -> bytes:
        return leader_key(self._etcd.place)

    def holds(self) -> bool:
        """Can nobody else be the leader yet?"""
        return time.monotonic() < self._until

    def resign(self) -> None:
        """Let another one lead at once."""
        self._ending.set()
        self._thread.join(LEASE_SECONDS)
        try:
            self._etcd.revoke(self._lease)
        except StorageError as error:
            log.info("the lease runs out by itself: %s", error.args[0])
        self._etcd.close()

    def _renew_for_ever(self) -> None:
        while not self._ending.wait(LEASE_SECONDS / _RENEWALS):
            asked = time.monotonic()
            try:
                if not self._etcd.keep_alive(self._lease):
                    log.warning("the lease of leadership has run out")
                    break
                self._until = asked + LEASE_SECONDS
            except StorageError as error:
                log.warning("leadership could not be renewed: %s", error.args[0])
                if not self.holds():
                    break
        else:
            return
        self._until = 0.0
        self._lost()


def leader_key(place: Place) -> bytes:
    return place.key("leader")


def campaign(
    place: Place, authorities: Path | None, me: str, lost: Callable[[], object], stopping: threading.Event
) -> Leadership | None:
    """Wait until this process leads; None when it is told to stop before.

    Args:
        me: what the others see of the leader.
        lost: called once, from another thread, when it leads no longer.
    """
    etcd = Etcd(place, authorities)
    key, seen = leader_key(place), ""
    while not stopping.is_set():
        try:
            asked = time.monotonic()
            lease = etcd.grant(LEASE_SECONDS)
            done = etcd.commit([Put(key, me.encode(), lease)], key=key, created=0, otherwise_read=True)
            revision = int(done.header.revision)
            if done.succeeded:
                log.info("leads, since revision %d of %s", revision, place.prefix)
                return Leadership(etcd, lease, revision, asked + LEASE_SECONDS, lost)
            etcd.revoke(lease)
            found = done.responses[0].response_range if done.responses else None
            leader = found.kvs[0].value if found is not None and found.kvs else ""
            if leader != seen:
                seen = leader
                log.info("another manager leads; this one stands by")
            etcd.wait(key, revision + 1, LEASE_SECONDS)
        except StorageError as error:
            log.warning("%s; tried again", error.args[0])
            stopping.wait(1.0)
    etcd.close()
    return None
