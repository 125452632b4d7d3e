"""One step of a run goes to other nodes at a time: whatever the order of saves, copies and news, and whoever is slow,
the loss of a node leaves a step that every rank can be given, once one was safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.agent.copying import Copying
from zerostall.core import copying
from zerostall.core.candidates import Past
from zerostall.core.copying import Copy, Course, Seen, decide
from zerostall.core.replicas import kept, next_wanted, unneeded
from zerostall.core.roll import Save
from zerostall.core.slots import Slots
from zerostall.wire import nodes as n

PARTS = 3
"""So many parts an image comes in."""


@dataclass
class Home:
    """A rank's memory on its node, which hears of what is decided in order, but late. A `berth` to `Copying`."""

    asked: int
    slots: Slots = field(init=False)
    clean: int = -1
    pending: set[int] = field(default_factory=set)
    news: deque[Save | n.Copy] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.slots = Slots(self.asked + copying.MOST_MORE)
        self.slots.grant()
        self.copying = Copying({0: self})  # pyright: ignore[reportArgumentType]

    def sealed(self) -> set[Past]:
        return {Past(slot.step, float(slot.step)) for slot in self.slots.sealed()}

    def created_of(self, save: Save) -> float | None:
        return float(save.step) if self.slots.at_step(save.step) else None

    def grant(self) -> bool:
        keep = frozenset({self.clean, *self.pending})
        spare = self.copying.spared(0, several=True)
        return self.slots.granted() is not None or self.slots.grant(keep, spare, self.asked).index is not None

    def seal(self, step: int) -> None:
        granted = self.slots.granted()
        assert granted is not None
        self.slots.seal(granted.index, step)
        self.pending.add(step)

    def hear(self) -> None:
        if self.news:
            match self.news.popleft():
                case Save() as save:
                    self.clean = save.step
                    self.pending.discard(save.step)
                case n.Copy() as copy:
                    self.copying.follow(copy.current, copy.safe)


@dataclass
class Partner:
    """The node that keeps a rank's images: two at most, and it hears of its home late."""

    here: set[Past] = field(default_factory=set)
    named: frozenset[Past] = frozenset()
    clean: frozenset[Past] = frozenset()
    wanted: Past | None = None
    coming: Past | None = None
    parts: int = 0

    def hear(self, home: Home) -> None:
        there = home.sealed()
        self.clean = frozenset(self.here & (self.clean | {past for past in there if past.step <= home.clean}))
        self.named = frozenset(home.copying.kept(0))
        self.here -= unneeded(self.here, there, self.clean, self.named)
        self.wanted = next_wanted(self.here, there, home.copying.wanted(0))

    def pull(self, home: Home) -> None:
        """One part more; what the home has no more comes to nothing."""
        if self.coming is None and self.wanted is not None and self.wanted not in self.here:
            keep = kept(self.here, self.clean, self.named)
            room = sorted(past for past in self.here if past.step not in keep)
            while len(self.here) > 1 and room:
                self.here.discard(room.pop(0))
            if len(self.here) < 2:
                self.coming, self.parts = self.wanted, 0
        if self.coming is not None and self.coming not in home.sealed():
            self.coming = None
        elif self.coming is not None:
            self.parts += 1
            if self.parts == PARTS:
                self.here.add(self.coming)
                self.coming = None


class Cluster:
    """`size` nodes with a rank each; the next node keeps its copies. Node 0 decides."""

    def __init__(self, size: int, slots: int) -> None:
        self.homes = [Home(slots) for _ in range(size)]
        self.partners = [Partner() for _ in range(size)]
        self.course = Course()
        self.newest: Save | None = None
        self.seen: dict[int, Seen] = {}
        self.given = [0] * size
        self.now = 0.0
        self.saves = 0
        self.sealed: dict[int, set[int]] = {}

    def tell(self, message: Save | n.Copy) -> None:
        for home in self.homes:
            home.news.append(message)
        self.homes[0].hear()

    def act(self, what: str, rank: int) -> None:
        rank %= len(self.homes)
        home, partner = self.homes[rank], self.partners[rank]
        self.now += 0.1
        match what:
            case "save":
                # Where a rank has no slot the others skip, too, which the roll call sees to.
                granted = [one.grant() for one in self.homes]
                if all(granted):
                    self.saves += 1
                    for one in self.homes:
                        one.seal(self.saves)
                    self.newest = Save(1, self.saves)
                    self.tell(self.newest)
                    self.look()
            case "news":
                home.hear()
            case "offer":
                partner.hear(home)
            case "pull":
                partner.pull(home)
                self.given[rank] += 1
            case "say":
                self.say(rank)
            case "all":
                for each in ("news", "news", "offer", "pull", "pull", "pull", "offer", "say"):
                    for one in range(len(self.homes)):
                        self.act(each, one)

    def say(self, rank: int) -> None:
        home = self.homes[rank]
        if home.copying.current == self.course.current:
            said = home.copying.said(0, [frozenset(self.partners[rank].here)], self.given[rank])
            self.seen[rank] = copying.seen(self.seen.get(rank), said.copy, said.given, self.now)
        self.look()

    def look(self) -> None:
        course = decide(self.course, self.newest, self.seen, len(self.homes), self.now)
        assert course.reason
        if course.current != self.course.current:
            self.seen.clear()
        if (course.current, course.safe) != (self.course.current, self.course.safe):
            self.course = course
            self.tell(n.Copy(course.current, course.safe))
        self.course = course

    def left(self, lost: int) -> set[int]:
        """The steps of which every rank's image can still be had when that node is lost with its memory."""
        size = len(self.homes)
        steps = set(range(self.saves + 1))
        for rank in range(size):
            mine = {past.step for past in self.homes[rank].sealed()} if rank != lost else set()
            kept_by = (rank + 1) % size
            theirs = {past.step for past in self.partners[rank].here} if kept_by != lost else set()
            steps &= mine | theirs
        return steps


ACTIONS = ("save", "save", "save", "news", "offer", "pull", "pull", "say", "all")
acts = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), min_size=20, max_size=120)


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 4), st.integers(2, 4), acts)
def test_the_loss_of_any_node_leaves_a_step_that_all_can_have(
    size: int, slots: int, actions: list[tuple[str, int]]
) -> None:
    cluster = Cluster(size, slots)
    reached = -1
    for what, rank in actions:
        cluster.act(what, rank)
        safe = cluster.course.safe
        if safe is not None:
            assert safe.step >= reached
            reached = safe.step
            for lost in range(size):
                assert max(cluster.left(lost), default=-1) >= reached, (what, rank, lost)
    # However it came about, the newest gets everywhere once saves rest.
    for _ in range(8):
        cluster.act("all", 0)
    assert cluster.newest is None or (cluster.course.current, cluster.course.safe) == (None, cluster.newest)


@given(st.integers(2, 5), st.lists(st.sampled_from(["seal", "hold", "release"]), max_size=30), st.data())
def test_what_stays_while_there_is_room_costs_no_save(count: int, actions: list[str], data: st.DataObject) -> None:
    """Whatever is spared, a slot is granted where one would be, but for slots that are more than enough."""
    slots = Slots(count)
    for step, what in enumerate(actions):
        if what == "seal":
            spare = frozenset(data.draw(st.sets(st.integers(0, 30))))
            keep = frozenset(data.draw(st.sets(st.integers(0, 30), max_size=2)))
            twin = [(slot.phase, slot.step, slot.readers) for slot in slots.table]
            enough = data.draw(st.integers(0, count))
            spared = [slot for slot in slots.sealed()[:-1] if slot.step in spare]
            firm = count - len(spared) >= enough
            granted = slots.grant(keep, spare, enough)
            bare = Slots(count)
            for slot, (phase, of, readers) in zip(bare.table, twin, strict=True):
                slot.phase, slot.step, slot.readers = phase, of, readers
            assert firm or (granted.index is None) == (bare.grant(keep).index is None)
            if granted.index is not None:
                was = twin[granted.index][1]
                assert was not in spare or not firm
                slots.seal(granted.index, step)
        elif what == "hold" and slots.sealed():
            slots.hold(data.draw(st.sampled_from(slots.sealed())).index)
        elif what == "release":
            for slot in slots.table:
                if slot.readers:
                    slots.release(slot.index)


seens = st.builds(
    Seen, st.sampled_from(Copy), st.just(0), st.floats(0, 5000, allow_nan=False), st.floats(0, 5000, allow_nan=False)
)


@given(st.dictionaries(st.integers(0, 3), seens), st.integers(1, 4), st.floats(0, 9000), st.booleans(), st.booleans())
def test_nobody_is_waited_for_for_ever(
    ranks: dict[int, Seen], world: int, now: float, again: bool, other: bool
) -> None:
    safe, current = Save(1, 1), Save(1, 2)
    newest = Save(2 if again else 1, 3 if other or again else 2)
    before = Course(current, safe, 0.0, None, "")
    after = decide(before, newest, ranks, world, now)
    copies = {rank: one.copy for rank, one in ranks.items() if rank < world}
    assert after.safe in (safe, current)
    if after.safe == current:
        assert Copy.has in copies.values() and set(range(world)) == copies.keys()
    if newest != current and now > copying.MOST_SECONDS:
        assert after.current != current
    if len(copies) == world and set(copies.values()) == {Copy.has} and not again:
        assert after.safe == current
        assert after.current == (newest if other else None)
    if len(copies) < world and now <= copying.MOST_SECONDS and newest.epoch == 1:
        gone = [rank for rank, copy in copies.items() if copy is Copy.gone]
        assert after.current == current or gone


def test_a_slow_partner_is_waited_for_and_a_silent_one_is_not() -> None:
    course = Course(Save(1, 2), Save(1, 1), 0.0)
    whole = Seen(Copy.has, 9, 10.0, 100.0)

    def then(one: Seen, now: float = 100.0, first: float | None = 10.0) -> Course:
        before = Course(course.current, course.safe, course.began, first)
        return decide(before, Save(1, 5), {0: whole, 1: one}, 2, now)

    assert then(Seen(Copy.lacks, 5, 99.0, 100.0)).current == course.current
    left_out = then(Seen(Copy.lacks, 5, 60.0, 100.0))
    assert (left_out.current, left_out.safe) == (Save(1, 5), course.current)
    assert "but for 1 whose partners do not take it, rank 1 the first" in left_out.reason
    assert then(Seen(Copy.lacks, 5, 60.0, 60.0)).safe == course.safe, "its node may be lost"
    assert then(Seen(Copy.lacks, 9, 399.0, 400.0), 400.0).safe == course.current, "the first needed 10 s"
    gone = then(Seen(Copy.gone, 5, 99.0, 100.0))
    assert (gone.current, gone.safe) == (Save(1, 5), course.safe)


def test_images_that_are_handed_over_after_the_news_of_them_are_known() -> None:
    """An agent takes the place of another: first it hears what was chosen, then trainers come with their images."""
    home = Home(3)
    home.copying.follow(Save(1, 2), Save(1, 1))
    assert home.copying.kept(0) == home.copying.wanted(0) == () and not home.copying.spared(0, several=True)
    assert home.copying.said(0, [frozenset()], 0).copy is Copy.gone
    for step in (1, 2):
        assert home.grant()
        home.seal(step)
    first, second = Past(1, 1.0), Past(2, 2.0)
    assert home.copying.kept(0) == (first,) and home.copying.wanted(0) == (first, second)
    assert home.copying.spared(0, several=True) == {1, 2}
    assert home.copying.said(0, [frozenset({first})], 0).copy is Copy.lacks
    home.copying.follow(Save(1, 3), Save(1, 2))
    assert home.copying.kept(0) == (second,)


def test_what_a_rank_is_lent() -> None:
    assert copying.lent(3, 10, 1, 100, several=True)[0] == 5
    assert copying.lent(3, 10, 1, 99, several=True)[0] == 4
    assert copying.lent(3, 10, 1, 100, several=False)[0] == 4
    count, reason = copying.lent(3, 10, 2, 100, several=True)
    assert (count, "no room" in reason) == (3, True)
