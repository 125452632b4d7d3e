"""Ways to checkpoint a training loop, behind one face, each called at its best known setting.

    verb             when the loop calls it
    before_update    after backward, before optimizer.step(): may wait until the last snapshot is taken
    save             after the step
    drain            outside of what is timed: returns when everything saved is finished (on disk)
    close            once

A peer that must finish one save before the next begins waits inside `save`, as a user would have to.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import torch

import zerostall
from benchmarks.workload import Job

State = dict[str, dict[str, object]]


class Peer(Protocol):
    """One way to checkpoint. `fsyncs`: whether a finished save survives a power cut."""

    fsyncs: bool
    skipped: int

    def before_update(self) -> None: ...
    def save(self, step: int) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class Nothing:
    """No checkpoint at all: what the loop costs by itself."""

    fsyncs = False
    skipped = 0

    def __init__(self, job: Job, folder: Path) -> None:
        del job, folder

    def before_update(self) -> None: ...
    def save(self, step: int) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class _Folders:
    """Keeps the newest two folders or files of a peer that does not delete old ones itself."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.folder.mkdir()
        self.skipped = 0
        self._kept: list[Path] = []

    def state(self) -> State:
        return {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict()}

    def next_path(self, step: int) -> Path:
        self._kept.append(self.folder / f"step-{step}")
        return self._kept[-1]

    def before_update(self) -> None: ...

    def drain(self) -> None:
        """What was saved is finished: delete all but the newest."""
        for old in self._kept[:-1]:
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
        del self._kept[:-1]

    def close(self) -> None: ...


class TorchSave(_Folders):
    """torch.save to a file, on the training thread."""

    fsyncs = False

    def save(self, step: int) -> None:
        torch.save(self.state(), self.next_path(step))


class DcpDefault(_Folders):
    """torch.distributed.checkpoint.async_save as in its tutorial: copies on the training thread, writes on another."""

    fsyncs = True

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        self._running = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        if self._running is not None:
            self._running.result()
        self._running = dcp.async_save(self.state(), checkpoint_id=self.next_path(step), no_dist=True)

    def drain(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None
        super().drain()


class DcpStager(_Folders):
    """The same with the asynchronous stager that keeps its memory: the copy, too, runs on another thread."""

    fsyncs = True

    def __init__(self, job: Job, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(job, folder)
        # Pinned memory and non-blocking copies need an accelerator; shared memory is only for its process writer.
        gpu = torch.accelerator.is_available()
        self._stager = DefaultStager(StagingOptions(gpu, False, True, gpu))
        self._running = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        if self._running is not None:
            self._running.upload_completion.result()
        self._running = dcp.async_save(
            self.state(), checkpoint_id=self.next_path(step), async_stager=self._stager, no_dist=True
        )

    def before_update(self) -> None:
        if self._running is not None:
            self._running.staging_completion.result()

    def drain(self) -> None:
        if self._running is not None:
            self._running.upload_completion.result()
            self._running = None
        super().drain()

    def close(self) -> None:
        if torch.__version__.startswith("2.11"):  # its stager's close() fails there
            self._stager._state_dict_stager.close = lambda: None
        self._stager.close()


class TorchCheckpointing(_Folders):
    """torch_checkpointing: staged in the background, written by a process of its own."""

    fsyncs = False

    def __init__(self, job: Job, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(job, folder)
        # Direct I/O, its default, is not aligned and fails on ext4 and xfs.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        # Without these two the first save would pay for starting a process and for allocating.
        self._manager._saver._checkpoint_process.wait_for_init()
        self._manager.prewarm_staging(self.state())
        self._manager._prewarm_staging_future.result()
        self._running = None

    def save(self, step: int) -> None:
        self._running = self._manager.save(str(self.next_path(step)), self.state())

    def before_update(self) -> None:
        with self._manager.lock():
            pass

    def drain(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None
        super().drain()

    def close(self) -> None:
        self._manager.close()


class Zerostall:
    """zerostall, guarding by `overlap`."""

    fsyncs = True
    policy = "overlap"

    def __init__(self, job: Job, folder: Path) -> None:
        self._checkpointer = zerostall.Checkpointer(
            folder, model=job.model, optimizer=job.optimizer, keep=2, policy=self.policy
        )
        self._last: zerostall.Saving | None = None
        self.skipped = 0

    def before_update(self) -> None: ...

    def save(self, step: int) -> None:
        saving = self._checkpointer.save(step)
        if saving.skipped:
            self.skipped += 1
        else:
            self._last = saving

    def drain(self) -> None:
        if self._last is not None:
            self._last.wait("disk", timeout=300)
            self._last = None

    def close(self) -> None:
        self._checkpointer.close()


class ZerostallFreeze(Zerostall):
    """zerostall, guarding by `freeze`: what is not copied yet is set aside in spare memory."""

    policy = "freeze"


PEERS: dict[str, type[Nothing] | type[_Folders] | type[Zerostall]] = {
    "none": Nothing,
    "torch.save": TorchSave,
    "dcp": DcpDefault,
    "dcp-stager": DcpStager,
    "torch_checkpointing": TorchCheckpointing,
    "overlap": Zerostall,
    "freeze": ZerostallFreeze,
}
LABELS = {
    "none": "no checkpoint",
    "torch.save": "torch.save",
    "dcp": "DCP async_save, as in its tutorial",
    "dcp-stager": "DCP async_save, asynchronous stager",
    "torch_checkpointing": "torch_checkpointing",
    "overlap": "**zerostall** (overlap)",
    "freeze": "**zerostall** (freeze)",
}
