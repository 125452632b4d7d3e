"""How often a run goes to its remote tier, and what would be lost if something died now: pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from zerostall.config import parse_bytes, parse_seconds
from zerostall.core.retention import Keep

if TYPE_CHECKING:
    from collections.abc import Iterable


class Remote(msgspec.Struct, frozen=True):
    """Where a run is carried to beyond its disk, and how often.

    >>> Remote("s3://bucket/runs/gpt", every="1h", keep=Keep(last=24), rate="200M")

    Attributes:
        url: below which the run is: `s3://`, `gs://` or `az://`.
        every: from one upload to the next: seconds, or such as "30s", "10m", "1h". The newest snapshot goes then. At
            once go: the last one when training ends or dies, one that is waited for or pinned.
        keep: how many steps stay there, or a `Keep`.
        rate: most bytes a second, such as "200M"; None for as fast as it goes.

    ValueError for what makes no sense.
    """

    url: str
    every: float | str = "10m"
    keep: int | Keep = 3
    rate: float | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or "://" not in self.url:
            raise ValueError(f"remote: {self.url!r} is no URL such as s3://bucket/run")
        self.seconds  # noqa: B018 - checked now, not when it is used
        self.retention  # noqa: B018
        self.bytes_per_second  # noqa: B018

    @property
    def seconds(self) -> float:
        return parse_seconds(self.every, "every")

    @property
    def retention(self) -> Keep:
        return self.keep if isinstance(self.keep, Keep) else Keep(last=self.keep)

    @property
    def bytes_per_second(self) -> float | None:
        if self.rate is None:
            return None
        rate = parse_bytes(self.rate, "rate") if isinstance(self.rate, str) else float(self.rate)
        if not 0 < rate < float("inf"):
            raise ValueError(f"rate={self.rate!r} is not a number of bytes a second above 0")
        return float(rate)


class Newest(msgspec.Struct, frozen=True):
    """The newest step of a tier: None where it holds none."""

    tier: str
    step: int | None
    created: float = 0.0


class Loss(msgspec.Struct, frozen=True):
    """What would be lost if something died now.

    Attributes:
        what: that dies.
        tier: the nearest that would still be there; "" for none.
        step: from which training would go on; None for from the start.
        seconds: since that step was saved, or from there to the newest step where nobody is training; None for no step.
    """

    what: str
    tier: str
    step: int | None
    seconds: float | None


PROCESS = "the training process"
_DEATHS = (
    (PROCESS, ("host", "replica", "disk", "remote")),
    ("this machine's power", ("replica", "disk", "remote")),
    ("this machine and its disk", ("replica", "remote")),
    ("the whole cluster", ("remote",)),
)


def losses(tiers: Iterable[Newest], now: float, *, training: bool = True) -> tuple[Loss, ...]:
    """What would be lost if the training process, the machine, its disk or the cluster died at `now`.

    Of each, the newest step that would still be there; of equal ones the nearest tier, as given. Where nobody is
    training, what is lost is counted from the newest step there is: since then nothing has come to be.
    """
    known = {newest.tier: newest for newest in tiers}
    if not training:
        now = max((newest.created for newest in known.values() if newest.step is not None), default=now)
    found: list[Loss] = []
    for what, left in _DEATHS:
        copies = [known[tier] for tier in left if tier in known and known[tier].step is not None]
        best = max(copies, key=lambda newest: newest.step or 0, default=None)
        if best is None:
            found.append(Loss(what, "", None, None))
        else:
            found.append(Loss(what, best.tier, best.step, max(0.0, now - best.created)))
    return tuple(found)
