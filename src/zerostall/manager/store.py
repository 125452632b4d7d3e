"""What the manager must still know after a restart, in one SQLite file: epochs, dirty marks, events.

What nodes hold is not here: the agents say it again. Nothing is written for a heartbeat.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.rollback import Key
from zerostall.errors import StorageError, VersionError
from zerostall.wire.state import Event

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
MOST_EVENTS = 10_000
MOST_MARKS = 10_000

_TABLES = """
create table node (name text primary key, instance text not null, epoch integer not null, present integer not null,
                   retired text not null);
create table mark (run text not null, step integer not null, attempt text not null, reason text not null,
                   primary key (run, step, attempt));
create table event (id integer primary key, at real not null, kind text not null, subject text not null,
                    text text not null);
"""


class NodeRow(msgspec.Struct, frozen=True):
    name: str
    instance: str
    epoch: int
    present: bool
    retired: tuple[str, ...] = ()


@dataclass(slots=True)
class Batch:
    """What has changed and is to be written in one transaction."""

    nodes: dict[str, NodeRow] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    marks: dict[Key, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.forgotten or self.marks or self.events)


@dataclass(frozen=True, slots=True)
class Remembered:
    nodes: tuple[NodeRow, ...]
    marks: dict[Key, str]
    events: tuple[Event, ...]


class Store:
    """One file. Any thread may use it, one at a time.

    Raises (on construction): StorageError, VersionError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.touch(0o600)
            self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
            self._base.execute("pragma journal_mode = wal")
            self._base.execute("pragma synchronous = full")  # an epoch that was given must never be given again
            (version,) = self._base.execute("pragma user_version").fetchone()
            if version > VERSION:
                raise VersionError(f"{path} was written by a newer zerostall (version {version} of it)")
            if version == 0:
                self._base.executescript(f"begin; {_TABLES} pragma user_version = {VERSION}; commit;")
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"cannot open {path}: {error}", hint="give another folder with --state") from error

    def load(self) -> Remembered:
        """Everything that is remembered, events oldest first.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            nodes = self._base.execute("select name, instance, epoch, present, retired from node").fetchall()
            marks = self._base.execute("select run, step, attempt, reason from mark order by rowid").fetchall()
            events = self._base.execute("select id, at, kind, subject, text from event order by id").fetchall()
        except sqlite3.Error as error:
            raise StorageError(f"cannot read {self._path}: {error}") from error
        return Remembered(
            tuple(
                NodeRow(name, instance, epoch, bool(present), tuple(retired.split()))
                for name, instance, epoch, present, retired in nodes
            ),
            {Key(run, step, attempt): reason for run, step, attempt, reason in marks},
            tuple(Event(*row) for row in events),
        )

    def save(self, batch: Batch) -> None:
        """Write a batch: all of it is on disk when this returns, or nothing.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            self._base.execute("begin immediate")
            try:
                self._write(batch)
            except BaseException:
                self._base.execute("rollback")
                raise
            self._base.execute("commit")
        except sqlite3.Error as error:
            raise StorageError(f"cannot write {self._path}: {error}") from error

    def close(self) -> None:
        self._base.close()

    def _write(self, batch: Batch) -> None:
        self._base.executemany("delete from node where name = ?", [(name,) for name in batch.forgotten])
        self._base.executemany(
            "insert or replace into node values (?, ?, ?, ?, ?)",
            [(row.name, row.instance, row.epoch, row.present, " ".join(row.retired)) for row in batch.nodes.values()],
        )
        self._base.executemany(
            "insert or ignore into mark values (?, ?, ?, ?)",
            [(key.run, key.step, key.attempt, reason) for key, reason in batch.marks.items()],
        )
        self._base.executemany(
            "insert or replace into event values (?, ?, ?, ?, ?)",
            [(event.id, event.at, event.kind, event.subject, event.text) for event in batch.events],
        )
        if batch.events:
            oldest = batch.events[-1].id - MOST_EVENTS
            self._base.execute("delete from event where id <= ?", (oldest,))
        if batch.marks:
            self._base.execute(
                "delete from mark where rowid <= (select max(rowid) - ? from mark)",
                (MOST_MARKS,),
            )
