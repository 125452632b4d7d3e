"""What comes with torch: torch.save, and torch.distributed.checkpoint in two forms."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from benchmarks.peers.contract import Training, state_of, tensors_in


class Folders:
    """Where peers write that do not delete old files themselves; a start for them."""

    outlives = "disk"

    def __init__(self, training: Training, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)  # all ranks save in one
        self.state = state_of(training)
        self.skipped = 0
        self._kept: list[Path] = []

    def next_path(self, step: int) -> Path:
        self._kept.append(self.folder / f"step-{step}")
        return self._kept[-1]

    @property
    def newest(self) -> Path:
        return self._kept[-1]

    def save(self, step: int) -> None:
        raise NotImplementedError

    def persist(self, step: int) -> None:
        self.save(step)

    def before_update(self) -> None: ...
    def staged(self) -> None: ...
    def drain(self) -> None: ...

    def make_room(self) -> None:
        while self._kept:
            old = self._kept.pop()
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)

    def load(self) -> dict[str, torch.Tensor]:
        return tensors_in(torch.load(self.newest, map_location="cpu", weights_only=True, mmap=True))

    def close(self) -> None: ...


class TorchSave(Folders):
    """torch.save to a file, on the training thread."""

    fsyncs = False

    def save(self, step: int) -> None:
        torch.save(self.state, self.next_path(step))


class DcpDefault(Folders):
    """torch.distributed.checkpoint.async_save as in its tutorial: copies on the training thread, writes on another."""

    fsyncs = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._running = None
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        # Its threads speak to those of other ranks while training does so over its own group.
        self._ranks: dict[str, object] = (
            {"process_group": torch.distributed.new_group(backend="gloo")} if several else {"no_dist": True}
        )

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.drain()
        self._running = dcp.async_save(self.state, checkpoint_id=self.next_path(step), **self._ranks)

    def drain(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None

    def load(self) -> dict[str, torch.Tensor]:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state, checkpoint_id=self.newest, **self._ranks)  # in place
        return tensors_in(self.state)


class DcpStager(DcpDefault):
    """The same with the asynchronous stager that keeps its memory: the copy, too, runs on another thread."""

    def __init__(self, training: Training, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(training, folder)
        # Pinned memory and non-blocking copies need an accelerator; shared memory is only for its process writer.
        gpu = torch.accelerator.is_available()
        self._stager = DefaultStager(StagingOptions(gpu, False, True, gpu))
        if torch.__version__.startswith("2.11"):  # there a save closes it, which also fails
            self._stager.close = self._stager._state_dict_stager.close = lambda: None
        self._saving = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.drain()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # its stream waits for no other: without this it may read too early
        self._saving = dcp.async_save(
            self.state, checkpoint_id=self.next_path(step), async_stager=self._stager, **self._ranks
        )

    def before_update(self) -> None:
        self.staged()

    def staged(self) -> None:
        if self._saving is not None:
            self._saving.staging_completion.result()

    def drain(self) -> None:
        if self._saving is not None:
            self._saving.upload_completion.result()
            self._saving = None

    def close(self) -> None:
        type(self._stager).close(self._stager)
