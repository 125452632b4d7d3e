"""`zerostall ls`, `show`, `pin` and `unpin`: what is stored where."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from zerostall.cli.arguments import Json, NamedStep, NewestStep, Only, Where, place, step_there
from zerostall.cli.output import emit_json, emit_table, say, size
from zerostall.core import matching
from zerostall.core.contents import Content
from zerostall.core.leaves import Leaf
from zerostall.core.manifest import RunFacts
from zerostall.core.matching import Selection
from zerostall.errors import SnapshotNotFoundError, ZerostallError
from zerostall.flow import catalog, inspection
from zerostall.flow.inspection import RankContents, StepContents
from zerostall.flow.node_agent import report_of_node
from zerostall.telemetry import moment
from zerostall.tiers.urls import is_url


class Listed(msgspec.Struct, frozen=True):
    """One step of `ls`; what is known only of steps on disk is null for one that is in memory alone."""

    step: int
    tiers: tuple[str, ...]
    clean: bool
    world: int
    nbytes: int | None
    metric: float | None
    pinned: bool
    created: float | None
    reason: str


class Listing(msgspec.Struct, frozen=True):
    """What `ls` finds.

    `set_aside` are steps that training went back before, `links` those that are left out since they are links.
    """

    where: str
    run: str | None
    name: str | None
    snapshots: tuple[Listed, ...]
    set_aside: tuple[int, ...]
    links: tuple[int, ...]


def ls(where: Where, json: Json = False) -> None:
    """List the steps of a run: when, how large, in which tiers, clean or why not."""
    listing = _listing(where)
    if json:
        emit_json(listing)
        return
    if listing.links:
        say(f"left out, for they are links, which are not followed: {', '.join(map(str, listing.links))}", "yellow")
    if not listing.snapshots:
        say(f"nothing is saved in {listing.where}")
        return
    rows = [
        (
            str(row.step),
            moment(row.created or 0.0),
            "–" if row.nbytes is None else size(row.nbytes),
            "–" if row.metric is None else f"{row.metric:.6g}",
            ", ".join(row.tiers),
            " ".join(["clean" if row.clean else "damaged", *(["pinned"] if row.pinned else [])]),
        )
        for row in listing.snapshots
    ]
    emit_table((">step", "saved", ">size", ">metric", "in", "state"), rows)
    for row in listing.snapshots:
        if row.reason:
            say(f"step {row.step} is damaged: {row.reason}", "red")
    if listing.set_aside:
        say(f"set aside, since training went back before them: {', '.join(map(str, listing.set_aside))}")


def _home(where: str) -> str:
    """The tier that a place is of."""
    return "remote" if is_url(where) else "disk"


def _listing(where: str) -> Listing:
    held = _held_here(where)
    try:
        found = catalog.snapshots(where)
        facts, aside, links = inspection.run_facts(where), inspection.set_aside(where), inspection.links(where)
    except SnapshotNotFoundError:
        if not held:
            raise
        found, facts, aside, links = [], None, [], []  # the first step is still on its way to disk
    home = _home(where)
    rows = {
        row.step: Listed(
            row.step,
            (home, *(held[row.step].tiers if row.step in held else ())),
            row.clean,
            row.world,
            row.nbytes,
            row.metric,
            row.pinned,
            row.created,
            row.reason,
        )
        for row in found
    }
    for step, here in held.items():
        rows.setdefault(step, Listed(step, here.tiers, True, here.world, None, None, False, None, ""))
    ordered = tuple(rows[step] for step in sorted(rows))
    run, name = (facts.run, facts.name) if facts else (None, None)
    return Listing(place(where), run, name, ordered, tuple(aside), tuple(links))


class _Held(msgspec.Struct, frozen=True):
    """What this node's agent has of a step: of how many ranks the step is, and in which tiers it is here."""

    world: int
    tiers: tuple[str, ...]


def _held_here(where: str) -> dict[int, _Held]:
    """Steps of the run that this node's agent holds in memory; none where no agent answers."""
    found: dict[int, _Held] = {}
    with contextlib.suppress(ZerostallError):
        report = report_of_node()
        ranks = [rank for rank in report.ranks if rank.where == place(where)] if report is not None else []
        for step, world in {step: rank.world for rank in ranks for step in rank.host_steps}.items():
            copies = min(rank.peer_steps.count(step) for rank in ranks)  # one that a rank lacks is no copy of the step
            peer = ("peer",) if copies == 1 else (f"peer ×{copies}",) if copies else ()
            found[step] = _Held(world, ("host", *peer))
    return found


class Shown(msgspec.Struct, frozen=True):
    """What `show` tells of a step."""

    where: str
    run: str
    name: str | None
    step: int
    world: int
    nbytes: int
    metric: float | None
    pinned: bool
    created: float
    tiers: tuple[str, ...]
    ranks: tuple[ShownRank, ...]


class ShownRank(msgspec.Struct, frozen=True):
    """One rank of a step; `checksum` is the CRC-32C of its image."""

    rank: int
    nbytes: int
    checksum: str
    layout: str
    tensors: tuple[ShownTensor, ...]
    values: tuple[Leaf, ...]


class ShownTensor(msgspec.Struct, frozen=True):
    """One tensor: `offset` is that of its bytes in the image, of its base's for an alias."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    alias_of: str | None
    offset: int


def show(
    where: Where,
    step: NewestStep = None,
    only: Only = None,
    json: Json = False,
) -> None:
    """Show what a step holds: tensors, types, shapes, sizes, aliases, small values, and where it is."""
    held = _held_here(where)
    try:
        found = inspection.inspect(where, step)
    except SnapshotNotFoundError as error:
        if step in held:
            raise SnapshotNotFoundError(
                f"step {step} is in the agent's memory and not on disk yet", hint="look again when it is"
            ) from error
        raise
    shown = _shown(where, found, inspection.run_facts(where), held.get(found.manifest.step), only)
    if json:
        emit_json(shown)
    else:
        _print(shown)


def _shown(
    where: str, found: StepContents, facts: RunFacts | None, held: _Held | None, only: Sequence[str] | None
) -> Shown:
    manifest, selection = found.manifest, _selection(found, only)
    home = _home(where)
    return Shown(
        where=place(where),
        run=manifest.run,
        name=facts.name if facts else None,
        step=manifest.step,
        world=manifest.world,
        nbytes=sum(rank.nbytes for rank in manifest.ranks),
        metric=manifest.metric,
        pinned=found.pinned,
        created=manifest.created,
        tiers=(home, *(held.tiers if held is not None else ())),
        ranks=tuple(_shown_rank(rank, selection) for rank in found.ranks),
    )


def _selection(found: StepContents, only: Sequence[str] | None) -> Selection:
    """What is asked for. ValueError for a pattern that fits no name."""
    selection = matching.select(only or None)
    matching.insist_on_use(selection, [one.name for rank in found.ranks for one in (*rank.tensors, *rank.values)])
    return selection


def _shown_rank(rank: RankContents, selection: Selection) -> ShownRank:
    chosen = selection.takes
    record = rank.record
    return ShownRank(
        rank=record.rank,
        nbytes=record.nbytes,
        checksum=f"{record.checksum:08x}",
        layout=record.layout,
        tensors=tuple(_shown_tensor(content) for content in rank.tensors if chosen(content.name)),
        values=tuple(leaf for leaf in rank.values if chosen(leaf.name)),
    )


def _shown_tensor(content: Content) -> ShownTensor:
    alias = content.alias_of or None
    return ShownTensor(content.name, content.dtype, content.shape, content.nbytes, alias, content.entry.offset)


def _print(shown: Shown) -> None:
    name = f" {shown.name}" if shown.name else ""
    say(f"step {shown.step} of{name} {shown.where}", "bold")
    words = [
        f"saved {moment(shown.created)}",
        size(shown.nbytes),
        f"in {', '.join(shown.tiers)}",
        *([f"metric {shown.metric:.6g}"] if shown.metric is not None else []),
        *(["pinned"] if shown.pinned else []),
        *([f"{shown.world} ranks"] if shown.world > 1 else []),
    ]
    say(" · ".join(words))
    for rank in shown.ranks:
        if shown.world > 1:
            say("")
            say(f"rank {rank.rank}", "bold")
        rows = [
            (
                tensor.name + (f" → {tensor.alias_of}" if tensor.alias_of else ""),
                tensor.dtype,
                " × ".join(map(str, tensor.shape)) or "scalar",
                "" if tensor.alias_of else size(tensor.nbytes),
            )
            for tensor in rank.tensors
        ]
        if rows:
            emit_table(("tensor", "type", ">shape", ">size"), rows)
        values = [(leaf.name, leaf.text) for leaf in rank.values if leaf.text not in ("{}", "[]")]
        if values:
            emit_table(("value", ""), values)


def pin(where: Where, step: NamedStep, json: Json = False) -> None:
    """Keep a step for ever: retention never evicts it."""
    _pin(where, step, True, json)


def unpin(where: Where, step: NamedStep, json: Json = False) -> None:
    """Let retention decide about a step again."""
    _pin(where, step, False, json)


def _pin(where: str, named: str, pinned: bool, json: bool) -> None:
    step = step_there(where, named)
    catalog.pin(where, step, pinned)
    if json:
        emit_json({"where": place(where), "step": step, "pinned": pinned})
    else:
        say(f"step {step} is {'pinned' if pinned else 'no longer pinned'}")
