"""A StorageWriter that writes steps of a run: one image a rank, the manifest last."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core import values
from zerostall.core.manifest import Manifest, RankFacts, Record, RunFacts
from zerostall.core.values import Document
from zerostall.errors import CapabilityError, RunMismatchError, StepExistsError
from zerostall.flow.folder_lock import FolderLock
from zerostall.flow.persist import prune
from zerostall.integrations.dcp.holdings import Holdings, Ticket
from zerostall.integrations.dcp.naming import Naming
from zerostall.integrations.dcp.place import names_a_step, place_of
from zerostall.integrations.dcp.stager import Stager
from zerostall.tiers.contract import Image
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.files import make_folder, real, storage_errors
from zerostall.trainer.exchange.rank_image import RankImage, copy_pool

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from zerostall.core.retention import Keep

_RANK = "\0rank"
"""The name, which no tensor has, of the result that tells of a rank's image."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank tells of its image."""

    facts: RankFacts
    record: bytes


class Writer(StorageWriter):
    """Writes steps of the run in `where`, a folder that all ranks see.

    Args:
        where: the run's folder; None: the folder of each `checkpoint_id`.
        step: which step; None: the number that each `checkpoint_id` ends in (`runs/gpt/step-100`).
        run: a name for the run, as `Checkpointer(run=...)` gives it.
        replace: a step of that number may be replaced.
        keep: which steps stay after a save; None: all.

    Without an `async_stager` of its own, `dcp.async_save` stages with this object: a copy by several threads, complete
    when the call returns.

    Raises (from `dcp.save`, within its CheckpointException):
        StepExistsError: the step is there, and `replace` was not said.
        StateError: something in the state cannot be stored without pickle; names it.
        RunBusyError: another process writes to the folder.
        RunMismatchError: the folder belongs to a run of another name.
        CapabilityError: a planner that caches plans, or `use_collectives=False`.
        StorageError, CapacityError: disk or memory ran short.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None = None,
        step: int | None = None,
        *,
        run: str | None = None,
        replace: bool = False,
        keep: Keep | None = None,
    ) -> None:
        super().__init__()
        self._where, self._step = where, step
        self._run, self._replace, self._keep = run, replace, keep
        self._place = place_of(None, where, step)
        self._coordinator = False
        self._stager: Stager | None = None
        self._open = contextlib.ExitStack()
        self._disk: DiskTier | None = None
        self._naming: Naming | None = None
        self._drafted: int | None = None
        self._mine: Record | None = None

    # ------------------------------------------------------------------------------------------ StorageWriter

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._let_go()
        self._place = place_of(checkpoint_id, self._where, self._step)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CapabilityError("a step is committed for all ranks at once: use_collectives=False cannot be had")
        self._coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise CapabilityError("plans that are cached say nothing of this save", hint="enable_plan_caching=False")
        try:
            return self._begun(plans)
        except BaseException:
            self._let_go()
            raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = self._written(cast("Ticket", plan.storage_data), plan, planner)
        except BaseException:
            self._let_go()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        disk, naming, mine = self._disk, self._naming, self._mine
        assert disk is not None and naming is not None and mine is not None
        written: dict[int, RankFacts] = {}
        found: dict[str, Document] = {}
        for rank, items in enumerate(results):
            for item in items:
                if item.index.fqn == _RANK:
                    written[rank] = cast("Written", item.storage_data).facts
                elif item.storage_data is not None:
                    found[item.index.fqn] = Document(item.storage_data)
        # What all ranks have said of small values is in the record of the first.
        record = msgspec.structs.replace(mine, values=naming.values(found))
        disk.put_record(record)
        written[mine.rank] = manifests.facts(record, manifests.encode_record(record))
        ranks = tuple(written[rank] for rank in sorted(written))
        manifest = Manifest(run=mine.run, step=mine.step, world=mine.world, ranks=ranks, created=mine.created)
        try:
            disk.commit(manifest, replace=self._replace)
            metadata.storage_meta = self.storage_meta()
            if self._keep is not None:
                prune(disk, self._keep, frozenset({mine.step}))
        finally:
            self._let_go()

    def storage_meta(self) -> StorageMeta | None:
        where, step = self._target()
        return StorageMeta(checkpoint_id=where / names.step_folder(step), save_id=uuid.uuid4().hex)

    @property
    def checkpoint_id(self) -> Path:
        """The folder of the step."""
        where, step = self._target()
        return where / names.step_folder(step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return names_a_step(checkpoint_id) and "://" not in os.fspath(checkpoint_id)

    # -------------------------------------------------------------------------------------------- AsyncStager

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in host memory, complete when this returns."""
        if self._stager is None:
            self._stager = Stager()
        return self._stager.stage(state_dict).result()

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Let go of the folder and of the copying threads. Optional: the end of the process does so, too."""
        self._let_go()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    # ------------------------------------------------------------------------------------------------- within

    def _target(self) -> tuple[Path, int]:
        where, step = self._place
        if where is None or step is None:
            raise ValueError("say where and which step: Writer('runs/gpt', step=100), or checkpoint_id='runs/gpt/100'")
        names.step_folder(step)  # ValueError for what is no step
        return real(where), step

    def _for_writing(self, where: Path) -> DiskTier:
        """The folder, for its one writer: this process, until the step is committed."""
        self._let_go()
        with storage_errors(where, "the run's folder", 0):
            make_folder(where)
            self._open.callback(FolderLock(where).close)
        self._disk = self._opened(where)
        return self._disk

    def _opened(self, where: Path) -> DiskTier:
        pool = copy_pool()
        self._open.callback(pool.close)
        return DiskTier(where, pool)

    def _let_go(self) -> None:
        if self._disk is not None and self._drafted is not None:
            self._disk.abandon(self._drafted)  # does nothing where it is committed
        self._open.close()
        self._disk = self._naming = self._drafted = self._mine = None

    def _facts_of(self, disk: DiskTier) -> RunFacts:
        facts = disk.run_facts()
        if facts is None:
            assert self._naming is not None
            fingerprint = layouts.fingerprint([layouts.build(self._naming.shards())])
            facts = disk.found_run(_run(self._run or "", fingerprint))
        if self._run not in (None, facts.name):
            raise RunMismatchError(f"{disk.where} belongs to the run {facts.name!r}, not to {self._run!r}")
        return facts

    def _begun(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans with what each rank must know, from the coordinator, which holds the folder from now on."""
        where, step = self._target()
        disk = self._for_writing(where)
        if step in disk.steps() and not self._replace:
            raise StepExistsError(f"step {step} is in {where} already", hint="choose another step, or replace=True")
        self._naming = naming = Naming.of(plans)
        facts = self._facts_of(disk)
        folder, created = disk.draft(step), time.time()
        self._drafted = step
        return [
            dataclasses.replace(
                plan,
                storage_data=Ticket(
                    facts.run, step, rank, len(plans), created, folder.name, naming.of_items(plan.items)
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def _written(self, ticket: Ticket, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results: list[WriteResult] = []
        held = Holdings(ticket)
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value = bytes(held.value(item, planner))
                results.append(WriteResult(item.index, len(value), value))
            else:
                nbytes = held.tensor(item, cast("torch.Tensor", planner.resolve_data(item)))
                results.append(WriteResult(item.index, nbytes, None))
        results.append(WriteResult(MetadataIndex(_RANK), 0, self._store(ticket, held)))
        return results

    def _store(self, ticket: Ticket, held: Holdings) -> Written:
        with contextlib.ExitStack() as stack:
            disk = self._disk
            if disk is None:  # of another process than the coordinator
                pool = copy_pool()
                stack.callback(pool.close)
                disk = DiskTier(self._target()[0], pool)
            pool = copy_pool()
            stack.callback(pool.close)
            disk.join(ticket.step, disk.where / ticket.folder)
            image = RankImage(held.shards, held.tensors, pool)
            stack.callback(image.close)
            record = Record.of(
                image.layout,
                image.checksums,
                values.encode({"parts": {}, "rng": None}),
                run=ticket.run,
                step=ticket.step,
                rank=ticket.rank,
                world=ticket.world,
                created=ticket.created,
            )
            disk.put(Image(image.layout, record, image.address))
            if self._coordinator:
                self._mine = record
            data = manifests.encode_record(record)
            return Written(manifests.facts(record, data), data)


def _run(name: str, fingerprint: str) -> RunFacts:
    return RunFacts(run=uuid.uuid4().hex, name=name, fingerprint=fingerprint, created=time.time())
