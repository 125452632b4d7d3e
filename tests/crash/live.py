"""A training run in the test's own process, whose state says of itself what step it is of."""

from __future__ import annotations

from pathlib import Path

import zerostall
from crash.states import Job
from zerostall import native
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m


class Run:
    """A job and its checkpointer. `skipped` and `failed` saves do not stop it."""

    def __init__(self, where: Path, **options) -> None:
        self.where = where
        self.job = Job()
        self.ckpt = zerostall.Checkpointer(where, **{"keep": 10, **options}, **self.job.state())

    def save(self, **options) -> zerostall.Saving:
        """Train one step, and begin to save it."""
        return self.ckpt.save(self.job.train_one_step(), when_busy="wait", **options)

    def restore(self, step: int | None = None, **options) -> int:
        """Restore, into a state that has nothing of it yet; checked bit for bit."""
        step = self.ckpt.restore(step, **options)
        assert not self.job.difference(step)
        return step

    def tidy(self) -> None:
        """Wait until retention has done what it could."""
        self.ckpt._link.ask(m.Tidy)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.ckpt.__exit__(*error)


def restored(where: Path, step: int | None = None) -> int:
    """The step that a new trainer restores, every bit checked."""
    with Run(where) as run:
        return run.restore(step)


def on_disk(where: Path) -> list[int]:
    """The steps that are committed in a run's folder."""
    return DiskTier(where, native.Pool("look", 1)).steps()
