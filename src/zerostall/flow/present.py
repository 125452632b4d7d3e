"""Steps that are evicted while they are read: what goes wrong then is that they are gone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from zerostall.core.steps import step_number
from zerostall.errors import FormatError, SnapshotNotFoundError, StorageError
from zerostall.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerostall.tiers.contract import RunTier

Found = TypeVar("Found")

_SHOWN = 8


def existing(run: RunTier, step: int) -> int:
    """The step itself. SnapshotNotFoundError where it is not committed; names those that are."""
    step = step_number(step)
    steps = run.steps()
    if step not in steps:
        if isinstance(run, DiskTier) and step in run.links():
            raise SnapshotNotFoundError(
                f"no step {step} in {run.where}: it is a link, and links are not followed",
                hint="move its folder back; docs/disks.md says how a run lies on several disks",
            )
        known = f"steps there: {listing(steps)}" if steps else "no step is there"
        raise SnapshotNotFoundError(f"no step {step} in {run.where}; {known}")
    return step


def newest(run: RunTier) -> int:
    """The newest clean step. SnapshotNotFoundError where there is none."""
    for step in reversed(run.steps()):
        with contextlib.suppress(FormatError, StorageError, SnapshotNotFoundError):
            if not run.missing(run.manifest(step)):
                return step
    raise SnapshotNotFoundError(f"no clean step in {run.where}", hint="see `zerostall ls`")


@contextlib.contextmanager
def present(run: RunTier, step: int) -> Iterator[None]:
    """Whoever reads the step in this block hears that it has gone, and not that it is damaged.

    Raises:
        SnapshotNotFoundError: it was evicted meanwhile.
    """
    try:
        yield
    except (FormatError, StorageError, SnapshotNotFoundError, FileNotFoundError) as error:
        if step in run.steps():
            raise
        raise SnapshotNotFoundError(
            f"step {step} of {run.where} was evicted while it was read", hint="pin a step to keep it: `zerostall pin`"
        ) from error


def read_step(run: RunTier, step: int | None, read: Callable[[int], Found]) -> Found:
    """What `read` makes of a step; of None, the newest clean one, or the one after where that is evicted meanwhile."""
    if step is not None:
        with present(run, existing(run, step)):
            return read(step)
    while True:
        chosen = newest(run)
        try:
            with present(run, chosen):
                return read(chosen)
        except SnapshotNotFoundError:
            if chosen in run.steps():
                raise


def listing(numbers: list[int]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else shown
