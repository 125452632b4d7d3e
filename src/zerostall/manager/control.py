"""What the manager knows and decides: messages and ticks in, answers and events out. No I/O and no clock of its own.

The decisions themselves are the pure ones of `core`; here they meet what nodes say. One thread drives it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from zerostall.core import prefetch, rollback
from zerostall.core.cluster import Change, Cluster, Health, Hearing, Patience
from zerostall.core.fabric import Fabric, stand
from zerostall.core.heirs import Claim
from zerostall.core.heirs import heir as decide_heir
from zerostall.core.placement import ImageId
from zerostall.core.rollback import Holding, Home, Key, Standing, Steps, Target, Verdict
from zerostall.core.topology import Place
from zerostall.manager.known import Known
from zerostall.manager.placing import Placing
from zerostall.manager.store import Batch, NodeRow, Remembered
from zerostall.wire import cluster as w
from zerostall.wire.state import Event

if TYPE_CHECKING:
    from zerostall.core.prefetch import Errands

EVENTS_SHOWN = 1000
FORGET_SECONDS = 24 * 3600.0


class Control:
    """Everything the manager has in memory; `fabric` is what a topology file says, where there is one."""

    def __init__(self, patience: Patience, remembered: Remembered, fabric: Fabric | None = None) -> None:
        self.fabric = fabric
        self.cluster = Cluster(patience)
        self.steps = Steps()
        self.known: dict[str, Known] = {}
        self.verdicts: dict[str, tuple[Verdict, ...]] = {}
        self.targets: dict[str, Target] = {}
        self.errands: dict[str, Errands] = {}
        self.broken: set[str] = set()
        self.placing = Placing(self.cluster, self.steps, self.known, self.tell)
        self.events: deque[Event] = deque(remembered.events[-EVENTS_SHOWN:], maxlen=EVENTS_SHOWN)
        self.wall = 0.0
        self._batch = Batch()
        self._fetching: dict[str, list[w.Fetching]] = {}
        self._gone_since: dict[str, float] = {}
        self._next_event = remembered.events[-1].id + 1 if remembered.events else 1
        for row in remembered.nodes:
            self.cluster.recall(row.name, row.instance, row.epoch, present=row.present, retired=row.retired)
        self.steps.marks.update(remembered.marks)

    # ------------------------------------------------------------------------------------------------ messages

    def join(self, message: w.Join, now: float) -> w.Joined | w.Refusal:
        """An agent asks for its node; the answer may be given once what `take_batch` returns is stored."""
        try:
            labels = Place.parse(message.labels)
        except ValueError as error:
            return w.Refusal("malformed", str(error))
        admission = self.cluster.join(
            message.node, message.instance, last_epoch=message.last_epoch, fenced=message.fenced
        )
        if admission.epoch is None:
            self.tell("node", message.node, f"an agent was refused: {admission.reason}")
            return w.Refusal("taken", admission.reason)
        if admission.changed:
            # What the agent before held counts until this one speaks: it may have taken the memory over.
            self._remember(message.node)
            self.tell("node", message.node, f"in epoch {admission.epoch}: {admission.reason}")
        if admission.changed or message.node not in self.known:
            standing = stand(message.node, labels, self.fabric)
            self.known[message.node] = Known(message, standing, now)
            if standing.doubt:
                self.tell("topology", message.node, standing.reason)
        self._gone_since.pop(message.node, None)
        self.placing.stale = True
        return w.Joined(epoch=admission.epoch, interval=self.cluster.patience.interval)

    def report(self, message: w.Report, now: float) -> w.Answer | w.Refusal:
        """A heartbeat, with what the node holds if that has changed."""
        known = self.known.get(message.node)
        if known is None:
            return w.Refusal("unknown", f"node {message.node} has not joined since this manager started")
        verdict = self.cluster.hear(message.node, message.epoch, message.sequence)
        if verdict.hearing not in (Hearing.news, Hearing.repeated):
            return w.Refusal(verdict.hearing.value, verdict.reason)
        if verdict.hearing is Hearing.news:
            known.report = message
            known.rates.update(message.counters, now)
            known.dirty = [(sent, dirty) for sent, dirty in known.dirty if sent is None or sent > message.heard]
            self._found(known, message.findings)
            if message.held is not None and message.version != known.version:
                known.version, known.runs = message.version, message.held
                self._take_in(known, message.held, now)
        return self._answer(known, message)

    def leave(self, message: w.Leave, now: float) -> w.Answer | w.Refusal:
        """The agent of a node ends: what it held in memory is gone."""
        change = self.cluster.leave(message.node, message.epoch)
        if change is None:
            return w.Refusal("fenced", f"node {message.node} is not in epoch {message.epoch}")
        self._changed(change, now)
        return w.Answer(sequence=0, interval=self.cluster.patience.interval)

    def whereis(self, message: w.WhereIs) -> w.Located:
        """Where a restore finds images beyond its node's own: newest step first, by rank, nearest first."""
        places = self._places()
        judged = {verdict.key: verdict for verdict in self.verdicts.get(message.run, ())}
        table = self.steps.runs.get(message.run)
        saved = {name: _saved(known, message.run) for name, known in self.known.items() if name in places}
        found: list[tuple[int, int, int, w.LocatedCopy]] = []
        for key in table.snapshots if table else ():
            if table is None or message.step not in (None, key.step):
                continue
            verdict = judged.get(key)
            firsts = (saved[node].get((key, 0), 0.0) for node, _ in self.steps.holders(key, 0) if node in saved)
            began = next(filter(None, firsts), 0.0)
            for rank in range(table.world) if message.everybody else (message.rank,):
                for node, tier in self.steps.holders(key, rank):
                    if node not in places or not self.known[node].join.peer:
                        continue
                    if node == message.node and tier in ("host", "disk") and not message.everybody:
                        continue  # that one it knows better itself
                    copy = w.LocatedCopy(
                        step=key.step,
                        attempt=key.attempt,
                        tier=tier,
                        peer=self.known[node].peer,
                        clean=verdict is not None and verdict.standing is Standing.clean,
                        world=table.world,
                        created=saved[node].get((key, rank), 0.0),
                        began=began,
                        reason=verdict.reason if verdict else "not judged yet",
                        rank=rank,
                        awaited=verdict is not None
                        and verdict.standing is Standing.past
                        and not rollback.PROVEN.isdisjoint(verdict.tiers),
                    )
                    far = prefetch.distance(message.node, (node, tier), places) if message.node in places else 0
                    found.append((-key.step, rank, far, copy))
        found.sort(key=lambda entry: (*entry[:3], entry[3].peer))
        return w.Located(tuple(copy for *_, copy in found))

    def heir(self, message: w.Empty) -> w.Inherited:
        """Which run an empty folder goes on with."""
        claims: list[Claim] = []
        for run, table in self.steps.runs.items():
            goal, said = self.targets.get(run), self._said(run)
            if goal is None or goal.key is None or said is None:
                continue
            there = {
                home: trains
                for home, trains in table.homes.values()
                if home in self.cluster.nodes and self.cluster.nodes[home].present
            }
            silent = min((self.cluster.nodes[home].silent for home in there), default=0.0)
            trains = any(trains for home, trains in table.homes.values() if home in there)
            claims.append(Claim(run, said.name, said.where, tuple(sorted(there)), trains, silent))
        found = decide_heir(claims, message.where, message.name, message.asked)
        if found.run:
            text = f"an empty folder on node {message.node} goes on with it: {found.reason}"
            self.tell("heir", found.run, text)
        return w.Inherited(found.run, found.name, found.reason, found.wait)

    # ------------------------------------------------------------------------------------------------- decisions

    def tick(self, now: float, wall: float) -> None:
        """Decide everything anew: who is there, what is clean, what must be fetched. A few times per interval."""
        self.wall = wall
        for change in self.cluster.judge(now):
            self._changed(change, now)
        for name in [name for name, since in self._gone_since.items() if now - since > FORGET_SECONDS]:
            self._forget(name)
        absent = {name: node.reason for name, node in self.cluster.nodes.items() if not node.present}
        places = self._places()
        spare = self._spare()
        self._fetching = defaultdict(list)
        for run in list(self.steps.runs):
            self._judge(run, absent, places, spare, now)

    def mark(self, key: Key, reason: str) -> None:
        """A snapshot is dirty for good, and every node that has part of it is told."""
        if key in self._batch.marks:
            return
        self.steps.mark(key, reason)
        self._batch.marks[key] = reason
        self.tell("dirty", key.run, f"{key} is dirty: {reason}")
        note = w.Dirty(key.run, key.step, key.attempt, reason)
        table = self.steps.runs.get(key.run)
        holders = table.snapshots[key].holders.values() if table and key in table.snapshots else ()
        for node in {node for places in holders for node, _ in places}:
            if node in self.known:
                self.known[node].dirty.append((None, note))

    def tell(self, kind: str, subject: str, text: str) -> None:
        """Say what has happened."""
        event = Event(self._next_event, self.wall, kind, subject, text)
        self._next_event += 1
        self.events.append(event)
        self._batch.events.append(event)

    def take_batch(self) -> Batch:
        """What is to be stored now."""
        batch, self._batch = self._batch, Batch()
        return batch

    # ---------------------------------------------------------------------------------------------------- parts

    def _judge(
        self, run: str, absent: dict[str, str], places: dict[str, Place], spare: frozenset[str], now: float
    ) -> None:
        table = self.steps.runs[run]
        known = {verdict.key: verdict.standing for verdict in self.verdicts.get(run, ())}
        marked = {key for key, snapshot in table.snapshots.items() if snapshot.dirty}
        verdicts = self.verdicts[run] = self.steps.judge(run, absent, now)
        for verdict in verdicts:
            if verdict.standing is Standing.dirty and verdict.key not in marked:
                self.mark(verdict.key, verdict.reason)
            elif verdict.standing is Standing.clean and known.get(verdict.key) is not Standing.clean:
                self.tell("clean", run, f"{verdict.key} is clean: {verdict.reason}")
        before, goal = self.targets.get(run), rollback.target(verdicts)
        self.targets[run] = goal
        broken = [rank for rank, (home, trains) in table.homes.items() if home in absent or not trains]
        if goal.key is not None and broken:
            # That all trainers end together is no accident.
            accident = len(broken) < table.world or any(table.homes[rank][0] in absent for rank in broken)
            if accident and (before is None or before.key != goal.key or run not in self.broken):
                self.tell("rollback", run, f"{len(broken)} of {table.world} ranks do not train: {goal.reason}")
                self.broken.add(run)
            known = self.errands[run].errands if run in self.errands else ()
            errands = self.errands[run] = prefetch.decide(self.steps, goal.key, places, spare)
            if new := [errand for errand in errands.errands if errand not in known]:
                more = f", and {len(new) - 1} more" if len(new) > 1 else ""
                self.tell("prefetch", run, f"{new[0].words()}{more}")
            for errand in errands.errands:
                self._fetching[errand.node].append(
                    w.Fetching(
                        run=run,
                        rank=errand.rank,
                        step=errand.key.step,
                        attempt=errand.key.attempt,
                        source=self.known[errand.source].peer,
                        tier=errand.tier,
                        reason=errand.reason,
                    )
                )
        else:
            self.errands.pop(run, None)
            self.broken.discard(run)
        if not table.snapshots and not any(trains for _, trains in table.homes.values()):
            for each in (self.steps.runs, self.verdicts, self.targets, self.errands):
                each.pop(run, None)

    def _take_in(self, known: Known, runs: tuple[w.RunNote, ...], now: float) -> None:
        homes: list[Home] = []
        holdings: list[Holding] = []
        for note in runs:
            for copy in note.whole:
                holdings.append(Holding(Key(note.run, copy.step, copy.attempt), rollback.ALL, copy.tier))
            for rank in note.ranks:
                if rank.home:
                    homes.append(Home(note.run, rank.rank, note.world, rank.trains))
                    self.placing.size(ImageId(note.run, rank.rank), rank.nbytes)
                for copy in rank.copies:
                    holdings.append(Holding(Key(note.run, copy.step, copy.attempt), rank.rank, copy.tier))
        before = {home.rank: self._home(home) for home in homes}
        self.steps.say(known.join.node, homes, holdings, now)
        for note in runs:
            self.steps.know(note.run, note.world)
        self.placing.stale = self.placing.stale or any(self._home(home) != before[home.rank] for home in homes)

    def _found(self, known: Known, findings: tuple[w.Finding, ...]) -> None:
        """What became of images that were doubted; each is told once."""
        for finding in findings:
            if finding.number > known.findings:
                known.findings = finding.number
                where = "on the disk" if finding.tier == "disk" else f"in the {finding.tier} memory"
                what = f"step {finding.step} of rank {finding.rank} {where} of node {known.join.node}"
                self.tell(finding.kind, finding.run, f"{what}: {finding.reason}")

    def _home(self, home: Home) -> str:
        table = self.steps.runs.get(home.run)
        return table.homes.get(home.rank, ("", False))[0] if table else ""

    def _answer(self, known: Known, message: w.Report) -> w.Answer:
        known.dirty = [(message.sequence if sent is None else sent, dirty) for sent, dirty in known.dirty]
        return w.Answer(
            sequence=message.sequence,
            interval=self.cluster.patience.interval,
            tell_all=message.version != known.version,
            plan=known.plan if known.plan.version != message.plan else None,
            fetching=tuple(self._fetching.get(message.node, ())),
            dirty=tuple(dirty for _, dirty in known.dirty),
        )

    def _changed(self, change: Change, now: float) -> None:
        self.tell("node", change.node, f"{change.was.value} → {change.now.value}: {change.reason}")
        if change.now in (Health.lost, Health.left):
            self.steps.gone(change.node, now)
            self._gone_since[change.node] = now
            self._remember(change.node)
            self.placing.stale = True

    def _forget(self, name: str) -> None:
        self._gone_since.pop(name)
        self.cluster.forget(name)
        self.known.pop(name, None)
        self._batch.nodes.pop(name, None)
        self._batch.forgotten.add(name)
        self.tell("node", name, "forgotten: it has not been there for a day")

    def _remember(self, name: str) -> None:
        node = self.cluster.nodes[name]
        self._batch.nodes[name] = NodeRow(name, node.instance, node.epoch, node.present, tuple(node.retired))

    def _said(self, run: str) -> w.RunNote | None:
        """What some node says of the run's folder and name."""
        notes = (note for known in self.known.values() for note in known.runs if note.run == run and note.where)
        return next(notes, None)

    def _places(self) -> dict[str, Place]:
        return {name: known.place for name, known in self.known.items() if self.cluster.nodes[name].present}

    def _spare(self) -> frozenset[str]:
        """Nodes on which nothing trains or did last."""
        taken = {home for table in self.steps.runs.values() for home, _ in table.homes.values()}
        return frozenset(
            name
            for name, known in self.known.items()
            if name not in taken and self.cluster.nodes[name].present and known.join.peer
        )


def _saved(known: Known, run: str) -> dict[tuple[Key, int], float]:
    """When each image of the run that the node has was saved; of whole steps, when rank 0's was."""
    found: dict[tuple[Key, int], float] = {}
    for note in known.runs:
        if note.run != run:
            continue
        for copy in note.whole:
            found[Key(run, copy.step, copy.attempt), 0] = copy.created
        for one in note.ranks:
            for copy in one.copies:
                found.setdefault((Key(run, copy.step, copy.attempt), one.rank), copy.created)
    return found
