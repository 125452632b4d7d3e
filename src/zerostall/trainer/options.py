"""What the user chose, checked."""

from __future__ import annotations

import contextlib
import operator
import os
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from zerostall import config
from zerostall.config import Policy, WhenBusy
from zerostall.core import matching
from zerostall.core.copiers import choose
from zerostall.core.policy import Remote
from zerostall.core.retention import Keep
from zerostall.core.vaults import Peer
from zerostall.telemetry import log
from zerostall.tiers.holding import step_here
from zerostall.tiers.urls import is_url
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of one checkpointer; see its docstring."""

    keep: Keep
    policy: Policy
    when_busy: WhenBusy
    slots: int
    freeze_bytes: int
    disk_interval: float
    copy_threads: int
    require_finite: str | Sequence[str] | None
    source_checks: float
    remote: Remote | None
    peer: Peer | None
    disks: tuple[str, ...]

    @classmethod
    def checked(
        cls,
        *,
        keep: int | Keep,
        policy: Policy,
        when_busy: WhenBusy,
        slots: int,
        freeze_bytes: int,
        disk_interval: float,
        guard: str,
        require_finite: str | Sequence[str] | None,
        source_checks: float,
        remote: str | Remote | None,
        peer: bool | Peer,
        disks: Sequence[str | os.PathLike[str]],
        where: Path | str,
    ) -> Options:
        """Check every choice; ValueError names the one that is wrong and what it may be."""
        one_of("policy", policy, get_args(Policy))
        one_of("when_busy", when_busy, get_args(WhenBusy))
        one_of("guard", guard, ("hooks", "manual"))
        if not isinstance(peer, (Peer, bool)):
            raise TypeError(f"peer={peer!r} is none of True, False, Peer(...)")
        if remote is not None and not isinstance(remote, (str, Remote)):
            raise TypeError(f"remote={remote!r} is no URL and no Remote(...)")
        slots, freeze_bytes = _whole("slots", slots), _whole("freeze_bytes", freeze_bytes)
        if slots < 2:
            raise ValueError(
                f"slots={slots}: one slot is captured into while another holds the newest image: 2 or more"
            )
        if freeze_bytes < 0:
            raise ValueError(f"freeze_bytes={freeze_bytes} is negative")
        if not isinstance(disk_interval, (int, float)) or not 0 <= disk_interval < float("inf"):
            raise ValueError(f"disk_interval={disk_interval!r} is not a number of seconds")
        if not isinstance(source_checks, Real) or not 0 <= source_checks <= 1:
            raise ValueError(f"source_checks={source_checks!r} is not a share of the chunks, from 0 (none) to 1 (all)")
        if require_finite is not None:
            matching.select(require_finite, option="require_finite")
        copiers = choose(config.cores(), torch.get_num_threads(), config.copy_threads())
        log.info("copy threads for state in host memory: %d, since %s", copiers.threads, copiers.reason)
        return cls(
            keep=keep if isinstance(keep, Keep) else Keep(last=keep),
            policy=policy,
            when_busy=when_busy,
            slots=slots,
            freeze_bytes=freeze_bytes,
            disk_interval=float(disk_interval),
            copy_threads=copiers.threads,
            require_finite=require_finite,
            source_checks=float(source_checks),
            remote=Remote(remote) if isinstance(remote, str) else remote,
            peer=(Peer() if peer else None) if isinstance(peer, bool) else peer,
            disks=_other_disks(disks, where),
        )

    def rules(self, patience: float) -> m.Rules:
        """The part that concerns the agent; `patience` as in `m.Rules`."""
        return m.Rules(
            keep_last=self.keep.last,
            keep_every=self.keep.every,
            keep_best=self.keep.best,
            best_mode=self.keep.mode,
            lossless=self.when_busy == "wait",
            disk_interval=self.disk_interval,
            patience=patience,
            disks=self.disks,
            keep_within=self.keep.seconds,
        )

    def remote_rules(self) -> m.RemoteRules | None:
        """The part that concerns the agent's remote tier, with this process's credentials."""
        if self.remote is None:
            return None
        keep = self.remote.retention
        return m.RemoteRules(
            url=self.remote.url,
            every=self.remote.seconds,
            keep_last=keep.last,
            keep_every=keep.every,
            keep_best=keep.best,
            best_mode=keep.mode,
            rate=self.remote.bytes_per_second,
            environment=config.store_environment(),
            keep_within=keep.seconds,
        )


def shapes_of(expected: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
    """What `expect_shapes` says; a TypeError where it says no shapes."""
    try:
        return {name: tuple(operator.index(size) for size in shape) for name, shape in (expected or {}).items()}
    except (TypeError, AttributeError):
        raise TypeError(
            f"expect_shapes={expected!r} is not of names and shapes: {{'model.weight': (10, 20)}}"
        ) from None


def place_of(where: str | os.PathLike[str] | Remote, remote: str | Remote | None) -> Place:
    """Where a run is: a folder, and beside it a URL; or a URL alone.

    Raises:
        ValueError: two URLs were given, or what is no folder's name, or a step's folder.
    """
    text = where.url if isinstance(where, Remote) else path_text("where", where)
    if not text or "\0" in text:
        raise ValueError(f"where={text!r} is no folder")
    if text == "~" or text.startswith("~/"):
        raise ValueError(f"where={text!r}: only a shell knows what ~ is; say os.path.expanduser({text!r})")
    if not is_url(text):
        folder = Path(text).absolute()
        step = None
        with contextlib.suppress(OSError):  # what cannot be looked at is the agent's to refuse
            step = step_here(folder)
        if step is not None:
            raise ValueError(f"where={text!r} is step {step} of a run: name the run's folder, {folder.parent}")
        return Place(folder, remote)
    if remote is not None:
        raise ValueError(f"where={text!r} is the remote tier itself: leave out remote, or name a folder")
    return Place(text, where if isinstance(where, Remote) else Remote(text))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is.

    Attributes:
        where: its folder, or its URL where it has no disk.
        remote: its remote tier.
    """

    where: Path | str
    remote: str | Remote | None

    @property
    def tiers(self) -> tuple[str, ...]:
        """Those that a step may be waited for in, nearest first."""
        if isinstance(self.where, str):
            return ("host", "remote")
        return ("host", "disk") if self.remote is None else ("host", "disk", "remote")

    @property
    def home(self) -> str:
        """The tier that makes a step durable."""
        return self.tiers[1]


def _other_disks(folders: Sequence[str | os.PathLike[str]], where: Path | str) -> tuple[str, ...]:
    """Absolute paths of folders, none of which is in another or in the run's own."""
    if isinstance(folders, (str, os.PathLike)):
        raise TypeError(f"disks={folders!r} is one folder, not several: disks=[...]")
    if not isinstance(folders, (list, tuple)):
        raise TypeError(f"disks={folders!r} is no list of folders")
    if folders and isinstance(where, str):
        raise ValueError(f"disks=...: {where} is no folder, so nothing is written to a disk")
    found = [Path(os.path.normpath(Path(path_text("disks", folder)).absolute())) for folder in folders]
    own = [Path(os.path.normpath(where))] if isinstance(where, Path) else []
    for number, folder in enumerate(found):
        if "\0" in str(folder) or str(folder).encode("utf-8", "replace").decode() != str(folder):
            raise ValueError(f"disks: {str(folder)!r} is no path in UTF-8")
        for other in (*own, *found[:number]):
            if folder.is_relative_to(other) or other.is_relative_to(folder):
                raise ValueError(f"disks: {folder} and {other} are not apart")
    return tuple(map(str, found))


def insist_on_name(run: object) -> None:
    """TypeError or ValueError for what is no name of a run."""
    if run is not None and not isinstance(run, str):
        raise TypeError(f"run={run!r} is no name: it must be text")
    if run and (len(run) > _LONGEST_NAME or not run.isprintable()):
        raise ValueError(
            f"run={run[:40]!r}: a name has at most {_LONGEST_NAME} characters, all of which can be printed"
        )


def path_text(name: str, path: object) -> str:
    """A path as text, which bytes are not: names in messages and records would be others than the user's."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(text := os.fspath(path), str):
        raise TypeError(f"{name}={path!r} is no path: a str, or a pathlib.Path")
    return text


def _whole(name: str, number: int) -> int:
    if isinstance(number, bool):
        raise TypeError(f"{name}={number!r} is no number")
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name}={number!r} is not a whole number") from None


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, allowed))}")


def metric_number(metric: float) -> float:
    """What a step is worth; anything that is a real number will do (a tensor or numpy array of one is), but no bool."""
    if isinstance(metric, (bool, str, bytes)):
        raise TypeError(f"metric must be a number, not {metric!r}")
    try:
        return float(metric)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"metric must be a number, not a {type(metric).__name__}: {error}") from None
