"""Another node that keeps images of this one's ranks: what it was told, and a connection that is kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zerostall.core import backoff
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.wire import peers as p

if TYPE_CHECKING:
    from zerostall.core.candidates import Past

AGAIN_SECONDS = 5.0
"""What was told is told again after so long: the other side may have dropped it, or been restarted."""
LOOK_SECONDS = 0.4
"""The same while the other side lacks what it should have: what it answers says whether it has it by now."""


class Partner:
    """One thread a partner, so that one that does not answer holds up nobody else. `offer` is for one thread."""

    def __init__(self, address: str, node: str, secret: str) -> None:
        self._address = address
        self._node = node
        self._secret = secret
        self._told: dict[tuple[str, int], tuple[p.Offer, float]] = {}
        self._had: dict[tuple[str, int], frozenset[Past]] = {}
        self._sending: set[tuple[str, int]] = set()
        self._channel: p.PeerChannel | None = None
        self._failures = 0
        self._try_at = 0.0
        self._worker = Worker(f"partner {address}")

    def offer(self, offer: p.Offer) -> None:
        """Tell the partner, unless it knows, is being told, or could not be reached just now."""
        key, now = (offer.run, offer.rank), time.monotonic()
        told = self._told.get(key)
        lacks = not frozenset(offer.wanted or ()) <= self._had.get(key, frozenset())
        again = LOOK_SECONDS if lacks else AGAIN_SECONDS
        known = told is not None and told[0] == offer and now - told[1] < again
        if known or key in self._sending or now < self._try_at:
            return
        self._sending.add(key)
        self._worker.submit(lambda: self._tell(key, offer))

    def had(self, run: str, rank: int) -> frozenset[Past]:
        """What the partner said last that it has of a rank. Any thread."""
        return self._had.get((run, rank), frozenset())

    def close(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.shut()
        self._worker.close(1.0)

    def _tell(self, key: tuple[str, int], offer: p.Offer) -> None:
        try:
            if self._channel is None:
                self._channel = p.connect(self._address, self._node, self._secret)
            self._channel.send(offer)
            noted = self._channel.receive(1 << 12)
            if not isinstance(noted, p.Noted):
                raise p.PeerError(f"{self._address} did not take note")
            self._had[key] = frozenset(noted.here)
            self._told[key] = (offer, time.monotonic())
            self._failures = 0
        except p.PeerError as error:
            self._failures += 1
            self._had.clear()
            self._try_at = time.monotonic() + min(AGAIN_SECONDS, backoff.pause(self._failures, 0.5))
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            if self._failures == 1:
                log.info("%s; tried again", error.args[0])
        finally:
            self._sending.discard(key)
