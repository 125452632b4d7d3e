"""Steps that are evicted or replaced while they are read: what goes wrong then is not that they are damaged."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol, TypeVar

from zerostall.core.steps import step_number
from zerostall.errors import FormatError, ReplacedError, SnapshotNotFoundError, StorageError
from zerostall.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerostall.tiers.contract import RunTier

Found = TypeVar("Found")


class _Finding(Protocol):
    @property
    def clean(self) -> bool: ...


Judged = TypeVar("Judged", bound=_Finding | None)

_SHOWN = 8
_TRIES = 100  # each of which somebody has replaced the step meanwhile


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
def present(run: RunTier, step: int, since: float | None = None) -> Iterator[None]:
    """Whoever reads the step in this block hears that it has gone, and not that it is damaged.

    `since`: the edition of which something was read before.

    Raises:
        SnapshotNotFoundError: it was evicted meanwhile.
        ReplacedError: another of its number has taken its place: some of what was read is of that. See `again`.
    """
    before = edition(run, step) if since is None else since
    try:
        yield
    except (FormatError, StorageError, SnapshotNotFoundError, FileNotFoundError) as error:
        if step in run.steps():
            if edition(run, step) == before:
                raise
            raise ReplacedError(
                f"step {step} of {run.where} was replaced while it was read", hint="read it once more"
            ) from error
        raise SnapshotNotFoundError(
            f"step {step} of {run.where} was evicted while it was read", hint="pin a step to keep it: `zerostall pin`"
        ) from error


def edition(run: RunTier, step: int) -> float:
    """What tells a step from others of its number: when it was saved. 0.0 where nobody can say, or below a URL.

    What takes a step's place there lies beside the old one, whose manifest names its own images.
    """
    return run.created(step) if isinstance(run, DiskTier) else 0.0


def steady(run: RunTier, step: int, look: Callable[[], Judged]) -> Judged:
    """What `look` finds of a step, once more where what is wrong with it may be that it was replaced, or evicted."""

    def once() -> Judged:
        before = edition(run, step)
        found = look()
        if found is not None and not found.clean and edition(run, step) != before:
            raise ReplacedError(f"step {step} of {run.where} was replaced while it was read", hint="read it once more")
        return found

    return again(once)


def again(read: Callable[[], Found]) -> Found:
    """Read something, and once more where it was replaced meanwhile."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(ReplacedError):
            return read()
    return read()


def read_step(run: RunTier, step: int | None, read: Callable[[int], Found]) -> Found:
    """What `read` makes of a step; of None, the newest clean one, or the one after where that is evicted meanwhile."""

    def look(step: int) -> Found:
        with present(run, step):
            return read(step)

    if step is not None:
        return again(lambda: look(existing(run, step)))
    while True:
        chosen = newest(run)
        try:
            return again(lambda step=chosen: look(step))
        except SnapshotNotFoundError:
            if chosen in run.steps():
                raise


def listing(numbers: list[int]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else shown
