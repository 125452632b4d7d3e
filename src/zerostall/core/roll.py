"""The roll call of a run's ranks: which saves are whole over all of them, and which can never be. A pure table.

Ranks save on their own, without a barrier. Each says of every save that it is *sealed*, or that it has *passed* it (it
was skipped there, or came to nothing). A save that every rank has sealed is clean; one that some rank has passed is
spoiled, and what the others hold of it is worth nothing.

        said by every rank: sealed ──▶ clean
    pending ──┤
        said by one: passed, or a later save, or its trainer has ended ──▶ spoiled

Ranks that are short of memory at different moments could skip in turns for ever. So where one rank has skipped what
another has sealed, a *hold* is set: all skip what comes before a step that all hear of in time. While saves go on being
spoiled that way the holds reach farther, each twice as far as the one before; what the ranks are apart is bounded, so
there is a step that all save.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

_FARTHEST = 4096
_REMEMBERED = 64
"""Of so many spoiled saves it is known why: ranks that seal one of them later hear the same as the others did."""


class Save(msgspec.Struct, frozen=True, order=True):
    """One save, by the name that all ranks know it by; later ones are greater.

    Attributes:
        epoch: counts how often the ranks have agreed where to go on from.
        step: number of finished training steps.
        turn: how often this step was saved before in the epoch.
    """

    epoch: int
    step: int
    turn: int = 0


NONE = Save(0, -1)
"""Before all saves."""


class Spoiled(msgspec.Struct, frozen=True):
    """A save that can never be clean, because of that rank.

    Attributes:
        skipped: the rank skipped it on purpose, for want of a slot.
        revoked: though the rank had sealed it; only so can what was clean be spoiled.
    """

    save: Save
    rank: int
    reason: str
    skipped: bool = False
    revoked: bool = False


class News(msgspec.Struct, frozen=True):
    """What has become known.

    Attributes:
        hold: skip all saves of steps before this one; 0 says nothing.
    """

    clean: tuple[Save, ...] = ()
    spoiled: tuple[Spoiled, ...] = ()
    hold: int = 0


NOTHING = News()


@dataclass(slots=True)
class _Pending:
    """A save that some ranks have sealed, since a time, and those that have not; `named`: those that were told."""

    missing: set[int]
    since: float
    told: float
    named: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Said:
    """The latest save that a rank has said something of, and why it is without it; empty where it sealed it."""

    save: Save
    reason: str
    skipped: bool


@dataclass(slots=True)
class Roll:
    """The table of one run of `world` ranks. One owner drives it; times are the caller's."""

    world: int
    _pending: dict[Save, _Pending] = field(default_factory=dict)
    _latest: dict[int, _Said] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)
    _fates: dict[Save, Spoiled] = field(default_factory=dict)
    _newest: Save = NONE
    _hold: Save = NONE
    _reach: int = 1

    def pending(self) -> list[Save]:
        """Saves that some ranks have sealed and no rank has passed, rising."""
        return sorted(self._pending)

    def sealed(self, rank: int, save: Save, now: float) -> News:
        """A rank's image is whole."""
        spoiled = self._pass(rank, [one for one in self._pending if one < save], f"it went on to step {save.step}")
        self._say(rank, save)
        one = self._pending.get(save)
        if one is None:
            culprit = next((r for r in range(self.world) if r != rank and self._has_passed(r, save)), None)
            if culprit is not None:
                reason, skipped = self._why(culprit, save)
                spoiled.append(self._fates.get(save) or Spoiled(save, culprit, reason, skipped))
                return News(spoiled=tuple(spoiled), hold=self._held(save) if skipped else 0)
            one = self._pending[save] = _Pending(set(range(self.world)), now, now)
        one.missing.discard(rank)
        if one.missing:
            return News(spoiled=tuple(spoiled))
        del self._pending[save]
        self._reach = 1
        return News(clean=(save,), spoiled=tuple(spoiled))

    def passed(self, rank: int, save: Save, reason: str, *, skipped: bool = False) -> News:
        """A rank goes on without a save.

        Args:
            skipped: on purpose, for want of a slot.
        """
        self._say(rank, save, reason, skipped)
        sealed_by_others = save in self._pending
        if not sealed_by_others:
            self._remember(Spoiled(save, rank, reason, skipped))
        spoiled = self._pass(rank, [one for one in self._pending if one < save], reason)
        spoiled += self._pass(rank, [save] if sealed_by_others else [], reason, skipped=skipped)
        return News(spoiled=tuple(spoiled), hold=self._held(save) if skipped and sealed_by_others else 0)

    def revoked(self, rank: int, save: Save, reason: str) -> News:
        """What a rank had sealed is worth nothing after all, be the save pending or clean."""
        self._say(rank, save, reason)
        self._pending.pop(save, None)
        self._remember(Spoiled(save, rank, reason))
        return News(spoiled=(Spoiled(save, rank, reason, revoked=True),))

    def began(self, rank: int, epoch: int) -> News:
        """A rank has agreed with all others where to go on from: what is pending of before will never be whole."""
        past = [save for save in self._pending if save.epoch < epoch]
        return News(spoiled=tuple(self._pass(rank, past, "the ranks have begun anew", whoever=True)))

    def lost(self, rank: int, reason: str) -> News:
        """A rank's trainer is gone."""
        self._lost[rank] = reason
        return News(spoiled=tuple(self._pass(rank, list(self._pending), reason)))

    def found(self, rank: int) -> None:
        """A rank's trainer is there."""
        self._lost.pop(rank, None)

    def overdue(self, now: float, patience: float) -> News:
        """Give up what has been pending for longer than `patience` seconds."""
        late = [(save, min(one.missing)) for save, one in self._pending.items() if now - one.since > patience]
        for save, _ in late:
            del self._pending[save]
        why = f"it has not saved it for {patience:.0f} s"
        spoiled = tuple(Spoiled(save, rank, why) for save, rank in late)
        self._remember(*spoiled)
        return News(spoiled=spoiled)

    def late(self, now: float, after: float, most: int) -> list[tuple[Save, tuple[int, ...]]]:
        """Saves pending for `after` seconds and the first `most` ranks they wait for, where these were not told yet."""
        found = []
        for save, one in self._pending.items():
            if now - one.since >= after and (ranks := tuple(sorted(one.missing)[:most])) != one.named:
                one.named = ranks
                found.append((save, ranks))
        return found

    def awaited(self, now: float, every: float) -> list[tuple[Save, tuple[int, ...]]]:
        """Saves that have been pending for `every` seconds, or as long again, and the ranks they wait for."""
        found = []
        for save, one in self._pending.items():
            if now - one.told >= every:
                one.told = now
                found.append((save, tuple(sorted(one.missing))))
        return found

    def _say(self, rank: int, save: Save, reason: str = "", skipped: bool = False) -> None:
        latest = self._latest.get(rank)
        if latest is None or save >= latest.save:
            self._latest[rank] = _Said(save, reason, skipped)
        self._newest = max(self._newest, save)

    def _has_passed(self, rank: int, save: Save) -> bool:
        return rank in self._lost or (rank in self._latest and self._latest[rank].save >= save)

    def _why(self, rank: int, save: Save) -> tuple[str, bool]:
        """Why a rank has passed a save, and whether it skipped it on purpose."""
        latest = self._latest.get(rank)
        if latest is None or latest.save < save:
            return self._lost[rank], False
        if latest.save == save:
            return latest.reason or "it has sealed another of that name", latest.skipped
        return f"it went on to step {latest.save.step}", True

    def _held(self, save: Save) -> int:
        """The hold to set because a rank has skipped what another has sealed; 0 where the one that is set will do."""
        if save < self._hold or save.epoch < self._newest.epoch:
            return 0
        self._hold = Save(save.epoch, self._newest.step + self._reach)
        self._reach = min(2 * self._reach, _FARTHEST)
        return self._hold.step

    def _pass(
        self, rank: int, saves: list[Save], reason: str, *, skipped: bool = False, whoever: bool = False
    ) -> list[Spoiled]:
        """Spoil those of these saves that the rank has not sealed."""
        gone = sorted(save for save in saves if whoever or rank in self._pending[save].missing)
        for save in gone:
            del self._pending[save]
        spoiled = [Spoiled(save, rank, reason, skipped) for save in gone]
        self._remember(*spoiled)
        return spoiled

    def _remember(self, *spoiled: Spoiled) -> None:
        for one in spoiled:
            self._fates.setdefault(one.save, one)
        while len(self._fates) > _REMEMBERED:
            del self._fates[next(iter(self._fates))]
