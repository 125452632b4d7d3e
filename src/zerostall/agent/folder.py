"""The folder of one run, as the agent that writes to it sees it."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.manifest import RunFacts
from zerostall.errors import FormatError, RunMismatchError, StorageError
from zerostall.flow.folder_lock import FolderLock, holder_of
from zerostall.telemetry import log
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.files import make_folder, read_file, storage_errors, write_whole
from zerostall.tiers.holding import run_of
from zerostall.tiers.modes import OWN, Modes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall import native
    from zerostall.core.layout import Layout


class RunFolder:
    """Taken while a trainer is attached or a step is on its way; let go otherwise, so that another node may take it.

    Attributes:
        on_disk: the committed steps, as far as this agent wrote or found them.
        undisturbed: nobody else has held the folder since this agent knew what is in it.
    """

    def __init__(self, where: Path, pool: native.Pool) -> None:
        self.where = where
        self.disk = DiskTier(where, pool)
        self.on_disk: set[int] = set()
        self.undisturbed = False
        self._holder = uuid.uuid4().hex
        self._seen = ""
        self._modes = OWN
        self._lock: FolderLock | None = None
        self._name_lost = False
        self.facts = RunFacts(run="unread", name="", fingerprint=layouts.fingerprint([]))

    def use(self, modes: Modes) -> None:
        """From now on, what is made gets these modes."""
        self._modes = modes
        self.disk.use(modes)

    def taken(self) -> bool:
        return self._lock is not None

    def same(self) -> bool:
        """Is it still the folder that was taken?"""
        return self._owns_lock() and self._is_there()

    def take(self, *, drafts: bool = True, several: bool = False) -> None:
        """Take the folder, creating it if need be, and clear what dead writers left; `drafts`: and steps of theirs.

        `several`: of a run with ranks on other nodes, too, which may know such a step to be committed.

        Raises:
            StorageError: it cannot be written.
            RunBusyError: another agent has it.
            FormatError: its run.json is not ours.
        """
        self.let_go()
        with storage_errors(self.where, "the run's folder", 0):
            make_folder(self.where, self._modes)
            self._lock = FolderLock(self.where, self._modes, self._holder)
            self.undisturbed = self._lock.before != "" and self._lock.before == self._seen
            self._seen = self._holder
            self._name_lost = False
            try:
                self._read_facts()
                self.disk.clear_leftovers(drafts=drafts, several=several)
                self.on_disk = set(self.disk.steps())
            except BaseException:
                self.let_go()
                raise

    def hold(self) -> None:
        """Before each write: is the folder still this run's? One that was removed is made anew.

        Raises:
            StorageError: it cannot be written.
            RunBusyError: another agent has it by now.
            RunMismatchError: another run has it by now.
        """
        if self.same():
            return
        with storage_errors(self.where, "the run's folder", 0):
            with contextlib.suppress(FileNotFoundError, FormatError):
                other = manifests.decode_run(read_file(self.where / names.RUN)).run
                if other != self.facts.run:
                    raise RunMismatchError(f"{self.where} has become the folder of another run, {other}")
            make_folder(self.where, self._modes)
            if not self._owns_lock():
                self.let_go()
                self._lock = FolderLock(self.where, self._modes, self._holder)
            self._write_facts(self.facts)
        log.warning("%s: the folder, its lock or run.json was gone and is made anew", self.where)

    def spread(self, folders: Sequence[str]) -> None:
        """From now on, deal images over these folders, too, which are on other disks.

        Raises:
            RunMismatchError: one is another run's.
            StorageError: the run's folder cannot be written.
        """
        self.disk.others.use([Path(folder) for folder in folders], self.facts.run)

    def let_go(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def run_there(self) -> str | None:
        """The run that `run.json` names, if it is there."""
        try:
            return manifests.decode_run(read_file(self.where / names.RUN), source=str(self.where / names.RUN)).run
        except FileNotFoundError:
            return None

    def follow(self, facts: RunFacts) -> None:
        """Another node's agent holds the folder, and says what run this is."""
        self.let_go()
        self.facts = facts
        self._seen = holder_of(self.where)
        self.on_disk = set(self.disk.steps())

    def check_name(self, name: str | None, *, empty: bool) -> None:
        """A named run keeps its folder to itself; an unnamed empty folder takes the name.

        Raises:
            RunMismatchError: the folder is another run's.
        """
        if name is None or name == self.facts.name:
            return
        if not self.facts.name and (empty or self._name_lost):
            self._write_facts(msgspec.structs.replace(self.facts, name=name))
            return
        known = repr(self.facts.name) if self.facts.name else f"without a name, id {self.facts.run}"
        raise RunMismatchError(
            f"{self.where} belongs to the run {known}; this trainer is run {name!r}",
            hint="give this run a folder of its own, move that one aside, or leave out run= to go on with it",
        )

    def blank(self) -> bool:
        """Is nothing of any run there?"""
        return not (self.where / names.RUN).exists() and not self.disk.steps()

    def inherit(self, run: str, name: str) -> None:
        """An empty folder goes on with a run whose own folder is gone, and of which other nodes have copies."""
        known = RunFacts(run=run, name=name, fingerprint=layouts.fingerprint([]), created=time.time())
        self._write_facts(known)

    def become(self, facts: RunFacts) -> None:
        """An empty folder goes on with a run that is elsewhere already."""
        self._write_facts(facts)

    def begins_with(self, layout: Layout) -> None:
        """Note what the run's state looked like at first, for people and for `zerostall doctor`."""
        if self.facts.fingerprint == layouts.fingerprint([]):
            try:
                self._write_facts(msgspec.structs.replace(self.facts, fingerprint=layouts.fingerprint([layout])))
            except StorageError as error:
                log.warning("%s", error)

    def _is_there(self) -> bool:
        """Is the folder still the one whose facts were read?"""
        try:
            return manifests.decode_run(read_file(self.where / names.RUN)).run == self.facts.run
        except (FileNotFoundError, FormatError):
            return False

    def _read_facts(self) -> None:
        told = run_of(self.where)
        if told is not None and not told.problem:
            self.facts = told.facts
            return
        if told is not None:
            log.warning("%s: %s; it is written anew from what the steps say", self.where, told.problem)
            self._name_lost = True
        run = uuid.uuid4().hex if told is None else told.facts.run
        self._write_facts(RunFacts(run=run, name="", fingerprint=layouts.fingerprint([]), created=time.time()))

    def _owns_lock(self) -> bool:
        return self._lock is not None and self._lock.is_of(self.where)

    def _write_facts(self, facts: RunFacts) -> None:
        data = manifests.encode_run(facts)
        with storage_errors(self.where / names.RUN, "the run's name", len(data)):
            write_whole(self.where / names.RUN, data, self._modes)
        self.facts = facts
