"""The remote tier: a run below a URL of an object store, each step committed by its manifest.

Nothing can be renamed there, and two writers may be at work without knowing of each other. So images and records are
named by what is in them (docs/format.md, 7): objects of one name are the same, whoever wrote them, and what an attempt
before had got there need not be sent again. A step is there when `step-…/manifest.json` is, which is written last, on
the condition that there is none, or that it is still the one that was read. Order of deleting: the manifest first.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.candidates import Past
from zerostall.core.retention import StepFacts
from zerostall.errors import ForeignStepError, FormatError, SnapshotNotFoundError, StepExistsError, StorageError
from zerostall.telemetry import log
from zerostall.tiers import kept, readings
from zerostall.tiers.contract import Image, ImageBytes, Stored
from zerostall.tiers.image_bytes import MemoryBytes, ObjectBytes
from zerostall.tiers.remote_images import RemoteImage, RemoteImages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, RankFacts, RunFacts
    from zerostall.tiers.store import Found, Store
    from zerostall.tiers.uploads import Gate

STALE_SECONDS = 24 * 3600.0
"""What no manifest names and nobody has touched for that long is left over. (Stores refuse requests from machines whose
clock is off by more than a quarter of an hour, so the two clocks agree well enough.)"""


@dataclass(frozen=True, slots=True)
class _There:
    """The manifest of a committed step, as it was read; None where it is damaged."""

    manifest: Manifest | None
    found: Found


class RemoteTier:
    """Images below a URL; see `contract.Tier`. Any number of processes may write and read; one thread calls it.

    Args:
        store: where.
        hands: threads for requests that may go at once, of nobody else's.
        gate: asked before bytes of images are sent or read; see `flow.governor`.
    """

    name = "remote"

    def __init__(self, store: Store, hands: Executor, gate: Gate = lambda nbytes: None) -> None:
        self.store = store
        self.where = store.url
        self._hands = hands
        self._images = RemoteImages(store, hands, gate)
        self._run = ""
        self._own: set[int] = set()

    # -------------------------------------------------------------------------------------------------- verbs

    def put(self, image: Image) -> None:
        self.carry(Stored(image.layout, image.record), MemoryBytes(image))

    def commit(self, manifest: Manifest, *, replace: bool = False, pin: bool = False) -> None:
        """See `contract.Tier`; `pin` marks the step so that retention never evicts it.

        A step that is there with the same bytes and was saved at the same time is this very one.
        """
        problem = kept.missing(manifest, self.store.objects(kept.folder(manifest.step)))
        if problem:
            raise FormatError(f"step {manifest.step} cannot be committed in {self.where}: {problem}")
        data = manifests.encode_manifest(manifest)
        name = self._name(manifest.step, names.MANIFEST)
        there = self._there(names.step_folder(manifest.step))
        if there is None:
            done = self.store.create(name, data)
        elif there.found.data == data:
            done = True
        elif replace or (there.manifest is not None and there.manifest.created == manifest.created):
            done = self.store.replace(name, data, there.found.version)
        else:
            raise StepExistsError(
                f"step {manifest.step} is committed in {self.where} already", hint="save with if_exists='replace'"
            )
        if not done and not self._is_ours(name, data):
            raise StepExistsError(
                f"another writer has just committed step {manifest.step} in {self.where}",
                hint="give every run a URL of its own",
            )
        if manifest.run == self._run:
            self._own.add(manifest.step)
        if pin:
            self.store.put(self._name(manifest.step, names.PINNED), b"")
        if there is not None and there.manifest is not None:
            self._images.discard(there.manifest, keep=kept.objects_of(manifest))

    def steps(self) -> list[int]:
        return self._committed("step-", names.parse_step)

    def manifest(self, step: int) -> Manifest:
        name = self._name(step, names.MANIFEST)
        try:
            data = self.store.read(name).data
        except FileNotFoundError:
            raise SnapshotNotFoundError(f"no step {step} in {self.where}") from None
        return readings.manifest_of(step, data, self.store.address(name), self._named())

    def open(self, step: int, rank: int) -> Stored:
        return self._opened(self.manifest(step), rank)

    def get(self, step: int, rank: int, address: int, *, chunks: Sequence[int] | None = None) -> Stored:
        stored = self.open(step, rank)
        self._images.get(self.image_name(step, rank), stored, address, chunks)
        return stored

    def evict(self, step: int) -> None:
        """A failure is logged, never raised: what is left over is invisible and goes when it is a day old."""
        try:
            there = self._there(names.step_folder(step))
            self._own.discard(step)
            if there is None:
                return
            self.store.delete([self._name(step, names.PINNED), self._name(step, names.MANIFEST)])
            if there.manifest is not None:
                self._images.discard(there.manifest, keep=self._named_by(names.rewound_folder(step)))
        except StorageError as error:
            log.warning("%s: step %d could not be removed: %s", self.where, step, error)

    # -------------------------------------------------------------------------------------- beyond the contract

    def bytes_of(self, step: int, rank: int, stored: Stored) -> ObjectBytes:
        return ObjectBytes(self.store, self.image_name(step, rank), stored.record.nbytes, self._hands)

    def image(self, step: int, rank: int) -> RemoteImage:
        """An image to be read chunk by chunk, by any thread. Raises as `open`."""
        manifest = self.manifest(step)
        stored, name = self._opened(manifest, rank), self._images.name(manifest, rank)
        return RemoteImage(stored, lambda index, view: self._images.begin(name, stored.record, index, view))

    def missing(self, manifest: Manifest) -> str:
        problem = kept.missing(manifest, self.store.objects(kept.folder(manifest.step)))
        return problem and kept.missing_beside(manifest, self.store.objects(names.step_folder(manifest.step)))

    def run_facts(self) -> RunFacts | None:
        try:
            data = self.store.read(names.RUN).data
        except FileNotFoundError:
            return None
        facts = manifests.decode_run(data, source=self.store.address(names.RUN))
        self._run = facts.run
        return facts

    def found_run(self, facts: RunFacts) -> RunFacts:
        if (there := self.run_facts()) is not None:
            return there
        if (told := self._told_by_steps()) is not None:
            facts = msgspec.structs.replace(facts, run=told.run)  # run.json was lost
        self.store.create(names.RUN, manifests.encode_run(facts))
        return self.run_facts() or facts

    def told_run(self) -> RunFacts | None:
        """As `run_facts`; where run.json is lost, by what the steps say."""
        return self.run_facts() or self._told_by_steps()

    def carry(self, stored: Stored, source: ImageBytes) -> int:
        """`put`, from wherever the bytes are. Returns how many had to be sent."""
        return self._images.carry(stored, source)

    def abandon(self, step: int) -> None:
        """Forget what was `put` of a step that is not to be committed any more. Never raises."""
        try:
            keep = self._named_by(names.step_folder(step)) | self._named_by(names.rewound_folder(step))
            self._images.abandon(step, keep)
        except (StorageError, FormatError) as error:
            log.warning("%s: what was sent of step %d is left for now: %s", self.where, step, error)

    def layout(self, facts: RankFacts) -> Layout:
        return self._images.layout(facts.layout, facts.begins)

    def image_name(self, step: int, rank: int) -> str:
        """The object that holds a rank's image of a committed step."""
        return self._images.name(self.manifest(step), rank)

    def pin(self, step: int, pinned: bool = True) -> None:
        """Mark a committed step so that retention never evicts it (or no longer)."""
        name = self._name(step, names.PINNED)
        if not pinned:
            self.store.delete([name])
            return
        self.manifest(step)
        self.store.put(name, b"")

    def pinned(self, step: int, *, rewound: bool = False) -> bool:
        folder = names.rewound_folder(step) if rewound else names.step_folder(step)
        return self.store.size(f"{folder}/{names.PINNED}") is not None

    def facts(self, steps: Iterable[int]) -> dict[int, StepFacts]:
        found = ((step, manifest) for step, manifest, _ in self.look(steps))
        return {step: StepFacts(step) if one is None else StepFacts.of(one) for step, one in found}

    def strangers(self, steps: Iterable[int], *, rewound: bool = False) -> set[int]:
        if rewound:
            return set()  # only this run's are set aside here

        def own(step: int) -> bool:
            try:
                self.manifest(step)
            except ForeignStepError:
                return False
            except (FormatError, SnapshotNotFoundError):
                return True
            return True

        asked = [step for step in steps if step not in self._own]
        ours = {step for step, is_own in zip(asked, self._images.each(own, asked), strict=True) if is_own}
        if self._run:
            self._own |= ours
        return set(asked) - ours

    def remove_again(self) -> None:
        """What could not be removed goes when it is old, see `clear_leftovers`."""

    def created(self, step: int) -> float:
        """When the committed step was saved, by which it is told from others of its number; 0.0 if it cannot say."""
        try:
            return self.manifest(step).created
        except (FormatError, OSError):
            return 0.0

    def created_of(self, steps: Iterable[int]) -> dict[int, float]:
        """`created` of many steps, several requests at once."""
        asked = list(steps)
        return dict(zip(asked, self._images.each(self.created, asked), strict=True))

    def look(self, steps: Iterable[int]) -> list[tuple[int, Manifest | None, str]]:
        """The manifests of many steps, several requests at once; None for one that is damaged, and why.

        Steps that are gone by now are left out.
        """

        def one(step: int) -> tuple[int, Manifest | None, str] | None:
            try:
                return step, self.manifest(step), ""
            except SnapshotNotFoundError:
                return None
            except FormatError as error:
                return step, None, str(error.args[0])

        return [found for found in self._images.each(one, steps) if found is not None]

    def set_aside(self, past: Iterable[Past]) -> list[int]:
        """Give these very steps another name so that they count no longer; their images stay where they are."""
        known = set(past)
        numbers = {one.step for one in known}
        aside: list[int] = []
        for step in [step for step in self.steps() if step in numbers]:
            there = self._there(names.step_folder(step))
            if there is None or there.manifest is None or Past(step, there.manifest.created) not in known:
                continue
            pinned = self.pinned(step)
            folder = names.rewound_folder(step)
            self.store.delete([f"{folder}/{names.PINNED}"])
            self.store.put(f"{folder}/{names.MANIFEST}", there.found.data)
            if pinned:
                self.store.put(f"{folder}/{names.PINNED}", b"")
            self.store.delete([self._name(step, names.PINNED), self._name(step, names.MANIFEST)])
            aside.append(step)
        return aside

    def rewound(self) -> list[int]:
        """Steps that were set aside."""
        return self._committed("rewound-", names.parse_rewound)

    def forget_rewound(self, step: int) -> None:
        folder = names.rewound_folder(step)
        gone = self._named_by(folder) - self._named_by(names.step_folder(step))
        self.store.delete([f"{folder}/{names.PINNED}", f"{folder}/{names.MANIFEST}"])
        self.store.delete(f"{kept.folder(step)}/{name}" for name in gone)

    def clear_leftovers(self, *, older: float = STALE_SECONDS) -> list[str]:
        """Remove what dead writers left more than `older` seconds ago: images that no manifest names, and uploads.

        Younger ones may belong to a writer that lives.
        """
        folders = self.store.folders()
        counted = {names.parse_step(folder) for folder in folders} | {names.parse_rewound(folder) for folder in folders}
        cleared = self._images.clear(counted, older)
        if cleared:
            log.info("%s: removed what unfinished uploads had left: %s", self.where, ", ".join(sorted(cleared)))
        return cleared

    def close(self) -> None:
        """Let go of connections."""
        self._images.close()

    # ------------------------------------------------------------------------------------------------ internals

    def _opened(self, manifest: Manifest, rank: int) -> Stored:
        readings.facts_of(manifest, rank, self.where)
        name, found = self._images.record(manifest, rank)
        return readings.stored_of(manifest, found.data, self.store.address(name), self._images.layout)

    def _committed(self, beginning: str, parse: Callable[[str], int | None]) -> list[int]:
        """The steps below folders so called that have a manifest."""
        listed = (name.partition("/") for name in self.store.beginning(beginning))
        found = (parse(folder) for folder, _, file in listed if file == names.MANIFEST)
        return sorted(step for step in found if step is not None)

    def _told_by_steps(self) -> RunFacts | None:
        return readings.run_told_by(one for _, one, _ in reversed(self.look(self.steps())) if one is not None)

    def _named(self) -> str | None:
        """Which run this is; None where run.json is lost or damaged. Asked for once."""
        if not self._run:
            with contextlib.suppress(FormatError):
                self.run_facts()
        return self._run or None

    def _name(self, step: int, file: str) -> str:
        return f"{names.step_folder(step)}/{file}"

    def _there(self, folder: str) -> _There | None:
        """What is committed in a step's folder."""
        name = f"{folder}/{names.MANIFEST}"
        try:
            found = self.store.read(name)
        except FileNotFoundError:
            return None
        try:
            return _There(manifests.decode_manifest(found.data, source=self.store.address(name)), found)
        except FormatError:
            return _There(None, found)

    def _is_ours(self, name: str, data: bytes) -> bool:
        """Did a write that was refused as second get there the first time, when its answer was lost?"""
        try:
            return self.store.read(name).data == data
        except FileNotFoundError:
            return False

    def _named_by(self, folder: str) -> set[str]:
        there = self._there(folder)
        return kept.objects_of(there.manifest) if there is not None and there.manifest is not None else set()
