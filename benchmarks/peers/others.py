"""What others made. Their packages are imported when they are measured, not before."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import types
from pathlib import Path

import torch

from benchmarks.peers.contract import Training, state_of, tensors_in
from benchmarks.peers.files import Folders

PATIENCE = 120.0


class TorchCheckpointing(Folders):
    """torch_checkpointing: staged in the background, written by a process of its own."""

    fsyncs = False

    def __init__(self, training: Training, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(training, folder)
        # Direct I/O, its default, is not aligned and fails on ext4 and xfs.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        # Without these two the first save would pay for starting a process and for allocating.
        self._manager._saver._checkpoint_process.wait_for_init()
        self._manager.prewarm_staging(self.state)
        self._manager._prewarm_staging_future.result()
        self._running = None

    def save(self, step: int) -> None:
        self._running = self._manager.save(str(self.next_path(step)), self.state)

    def before_update(self) -> None:
        with self._manager.lock():
            pass

    def staged(self) -> None:
        if self._manager._staging_future is not None:
            self._manager._staging_future.result()

    def drain(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None

    def load(self) -> dict[str, torch.Tensor]:
        return tensors_in(dict(self._manager.load(str(self.newest), into=self.state, map_location="cpu")))

    def close(self) -> None:
        self._manager.close()


class LmResiliency:
    """lm-resiliency's in-memory checkpoints: two pinned copies within the training process, no peers."""

    fsyncs = True
    outlives = "nothing"

    def __init__(self, training: Training, folder: Path) -> None:
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.experimental import InMemoryCheckpointManager

        self.skipped = 0
        self._folder = folder
        self._tensors = tensors_in(state_of(training))
        config = InMemoryCkptConfig(
            enable=True, interval=1, disk_flush_interval=0, disk_folder=str(folder), run_id="benchmark"
        )
        # Natural replicas: two slots and not four, since there are no peers here.
        alone = types.SimpleNamespace(has_natural_replicas=True)
        self._manager = InMemoryCheckpointManager(config, parallelism_info=alone)
        self._step = self._unwritten = 0

    def save(self, step: int) -> None:
        self._step = step
        self._manager.save_tensors(list(self._tensors.values()), step)

    def persist(self, step: int) -> None:
        self.save(step)
        self._unwritten = step

    def before_update(self) -> None:
        self._manager.maybe_wait()

    def staged(self) -> None:
        self._manager.maybe_wait()

    def drain(self) -> None:
        self._manager.maybe_wait()
        if self._unwritten:  # only what has landed can be written
            self._manager.flush_to_disk(self._unwritten)
            self._manager._disk.wait()
            self._unwritten = 0

    def make_room(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def load(self) -> dict[str, torch.Tensor]:
        loaded = self._manager.load_tensors(step=self._step)
        assert loaded is not None
        return dict(zip(self._tensors, loaded[0], strict=True))

    def close(self) -> None:
        self._manager.close()


class Nvrx(Folders):
    """NVIDIA Resiliency Extension: torch.save in a process of its own, copies on the training thread."""

    fsyncs = False

    def __init__(self, training: Training, folder: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        super().__init__(training, folder)
        if not torch.distributed.is_initialized():  # it asks for its rank
            store = torch.distributed.FileStore(str(folder.parent / "store"), 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._checkpoint = TorchAsyncCheckpoint()

    def save(self, step: int) -> None:
        self.drain()  # it would queue them, and with them copies of the state
        self._checkpoint.async_save(self.state, str(self.next_path(step)))

    def drain(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True)

    def close(self) -> None:
        self._checkpoint.close()
        torch.distributed.destroy_process_group()


class DLRover:
    """DLRover's flash checkpoint: copied to shared memory on the training thread, written by another process.

    While it writes, it skips saves, and says so only by what it returns.
    """

    fsyncs = False
    outlives = "memory"

    def __init__(self, training: Training, folder: Path) -> None:
        for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("LOCAL_WORLD_SIZE", "1"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("ELASTIC_JOB_NAME", f"benchmark-{os.getpid()}")  # names its shared memory
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self.skipped = 0
        self.folder = folder
        self.folder.mkdir()
        self.state = state_of(training)
        self._checkpointer = DdpCheckpointer(str(folder))
        self._unwritten = 0

    def save(self, step: int) -> None:
        if not self._engine_save(step):
            self.skipped += 1

    def _engine_save(self, step: int) -> bool:
        # As save_checkpoint(..., StorageType.MEMORY) does, which keeps back whether it was done.
        path = str(self.folder / f"{step}" / "rank_0.pt")
        return bool(
            self._checkpointer._engine.save_to_memory(step, {"model_states": self.state}, {"model_states": path})
        )

    def persist(self, step: int) -> None:
        path = str(self.folder / f"{step}" / "rank_0.pt")
        engine = self._checkpointer._engine
        if engine.save_to_storage(step, {"model_states": self.state}, {"model_states": path}):
            self._unwritten = step
        else:
            self.skipped += 1

    def before_update(self) -> None: ...
    def staged(self) -> None: ...

    def drain(self) -> None:
        tracker = self.folder / "dlrover_latest.txt"
        deadline = time.monotonic() + PATIENCE
        while self._unwritten and time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                if int(tracker.read_text()) >= self._unwritten:
                    self._unwritten = 0
                    return
            time.sleep(0.02)
        if self._unwritten:
            raise TimeoutError(f"step {self._unwritten} was not written")

    def make_room(self) -> None:
        for old in self.folder.glob("[0-9]*"):
            shutil.rmtree(old)

    def load(self) -> dict[str, torch.Tensor]:
        return tensors_in(self._checkpointer.load_checkpoint())

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine.close()
        if engine.saver_proc is not None:
            engine.saver_proc.kill()
