"""What a manager must still know after a restart, in etcd: for several managers, of which one leads."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import msgspec

from zerostall.core.rollback import Key
from zerostall.errors import StorageError
from zerostall.manager.etcd import MOST_OPERATIONS, Delete, Etcd, Put
from zerostall.manager.store import MOST_EVENTS, MOST_MARKS, NodeRow, Remembered
from zerostall.wire.state import Event

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.manager.election import Leadership
    from zerostall.manager.etcd import Place
    from zerostall.manager.store import Batch


class EtcdStore:
    """As `manager.store.Store`, while this process leads: who leads no longer stores nothing.

        <prefix>/node/<name>                     epoch and agents of a node
        <prefix>/mark/<run>/<step>/<attempt>     why a snapshot is dirty
        <prefix>/event/<number>                  what happened

    One thread at a time.
    """

    def __init__(self, place: Place, authorities: Path | None, leadership: Leadership) -> None:
        self._etcd = Etcd(place, authorities)
        self._leadership = leadership
        self._marks: list[bytes] = []

    def load(self) -> Remembered:
        """Everything that is remembered, events oldest first. Raises StorageError."""
        place = self._etcd.place
        try:
            nodes = [msgspec.json.decode(value, type=NodeRow) for _, value in self._etcd.read(place.key("node", ""))]
            marks = [_mark_of(key, value) for key, value in self._etcd.read(place.key("mark", ""))]
            events = [msgspec.json.decode(value, type=Event) for _, value in self._etcd.read(place.key("event", ""))]
        except (msgspec.MsgspecError, ValueError) as error:
            raise StorageError(f"what is in etcd under {place.prefix} is not a manager's: {error}") from error
        self._marks = [self._mark_key(key) for key, _ in marks]
        return Remembered(tuple(nodes), dict(marks), tuple(events))

    def save(self, batch: Batch) -> None:
        """Write a batch; all of it is stored when this returns.

        Raises:
            StorageError: it could not be stored, or another manager leads.
        """
        place = self._etcd.place
        operations: list[Put | Delete] = [
            Put(place.key("node", quote(row.name, safe="")), msgspec.json.encode(row)) for row in batch.nodes.values()
        ]
        operations += [Delete(place.key("node", quote(name, safe=""))) for name in batch.forgotten]
        for key, reason in batch.marks.items():
            operations.append(Put(self._mark_key(key), msgspec.json.encode(reason)))
            self._marks.append(self._mark_key(key))
        for event in batch.events:
            operations.append(Put(self._event_key(event.id), msgspec.json.encode(event)))
        if batch.events and (oldest := batch.events[-1].id - MOST_EVENTS) > 0:
            operations.append(Delete(place.key("event", ""), self._event_key(oldest + 1)))
        while len(self._marks) > MOST_MARKS:
            operations.append(Delete(self._marks.pop(0)))
        for first in range(0, len(operations), MOST_OPERATIONS):
            some = operations[first : first + MOST_OPERATIONS]
            done = self._etcd.commit(some, key=self._leadership.key, created=self._leadership.revision)
            if not done.succeeded:
                raise StorageError("another manager leads by now: nothing is stored by this one")

    def close(self) -> None:
        self._etcd.close()

    def _event_key(self, number: int) -> bytes:
        return self._etcd.place.key("event", f"{number:016}")

    def _mark_key(self, key: Key) -> bytes:
        return self._etcd.place.key("mark", quote(key.run, safe=""), f"{key.step:016}", quote(key.attempt, safe=""))


def _mark_of(key: bytes, value: bytes) -> tuple[Key, str]:
    run, step, attempt = key.decode().split("/")[-3:]
    return Key(unquote(run), int(step), unquote(attempt)), msgspec.json.decode(value, type=str)
