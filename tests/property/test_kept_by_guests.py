"""Whatever a rank's home does and whenever it is heard: a partner keeps what it has of the newest clean step that it
knows of until it has a newer one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import example, given, settings
from hypothesis import strategies as st

from images import make_layout, record_of
from zerostall import native
from zerostall.agent.guests import Guests, Place
from zerostall.core.candidates import Past
from zerostall.core.layout import Layout
from zerostall.core.placement import ImageId
from zerostall.core.replicas import next_wanted
from zerostall.flow.budget import Budget

IMAGE = ImageId("r" * 32, 1)
LAYOUTS = [make_layout(4096 * size) for size in (1, 2)]
SLOTS = 3


class Home:
    """The rank's home: its newest clean image stays, others make room."""

    def __init__(self, grown: int) -> None:
        self.grown = grown
        self.step = 0
        self.images: dict[Past, bool] = {}  # whether of a clean step
        self.clean: set[Past] = set()  # ever
        self.gone: set[Past] = set()

    def layout(self, step: int) -> Layout:
        return LAYOUTS[step >= self.grown]

    def save(self) -> None:
        newest = max((past for past, clean in self.images.items() if clean), default=None)
        room = [past for past in sorted(self.images) if past != newest]
        if len(self.images) == SLOTS:
            del self.images[room[0]]
        self.step += 1
        self.images[Past(self.step, float(self.step))] = False

    def again(self) -> None:
        """The newest step's number is saved once more: at home the image of before goes at once."""
        newest = max(self.images, default=None)
        if newest is not None and newest.step == self.step:
            del self.images[newest]
            self.images[Past(self.step, newest.created + 1 / 64)] = False

    def settle(self, *, clean: bool) -> None:
        """It becomes known of the oldest that is pending whether its step is clean."""
        pending = [past for past in sorted(self.images) if not self.images[past]]
        if not pending:
            return
        if clean:
            self.images[pending[0]] = True
            self.clean.add(pending[0])
        else:
            del self.images[pending[0]]
            self.gone.add(pending[0])


class Partner:
    """The node that keeps the images, hearing its home through offers alone."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.guests = Guests(Budget(1 << 30), native.Pool("test", 1))
        self.offered: set[Past] = set()
        self.coming: tuple[Place, Past] | None = None

    def hear(self) -> None:
        home = self.home
        self.offered = set(home.images)
        self.guests.offered(IMAGE, home.images, home.gone, [past for past, clean in home.images.items() if clean])

    def begin(self) -> None:
        wanted = next_wanted(self.guests.images(IMAGE), self.offered, clean=self.guests.clean(IMAGE))
        if self.coming is None and wanted is not None:
            place = self.guests.reserve(IMAGE, 2, self.home.layout(wanted.step))
            self.coming = (place, wanted) if place is not None else None

    def end(self, *, whole: bool) -> None:
        if self.coming is None:
            return
        (place, past), self.coming = self.coming, None
        if not whole or past in self.home.gone:
            self.guests.discard(place)
            return
        layout = self.home.layout(past.step)
        data = layout.header + bytes(layout.nbytes - len(layout.header))
        place.view(0, layout.nbytes)[:] = data
        record = record_of(layout, data, past.step, run=IMAGE.run, rank=1, world=2, created=past.created)
        self.guests.seal(place, record, "")

    def known(self) -> int:
        """The newest step of an image here that its home has said is clean."""
        ((_, guest),) = self.guests._guests.items() if len(self.guests) else ((None, None),)
        return max((past.step for past in guest.clean), default=0) if guest is not None else 0

    def clean(self) -> int:
        """The newest step of an image here that is clean, be it known or not."""
        return max((past.step for past in self.guests.images(IMAGE) & self.home.clean), default=0)


ACTIONS = ("save", "save", "again", "clean", "spoil", "hear", "begin", "come", "break", "all")


def act(home: Home, partner: Partner, what: str) -> Iterator[None]:
    match what:
        case "save":
            home.save()
        case "again":
            home.again()
        case "clean" | "spoil":
            home.settle(clean=what == "clean")
        case "hear":
            partner.hear()
        case "begin":
            partner.begin()
        case "come" | "break":
            partner.end(whole=what == "come")
        case "all":
            for each in ("save", "hear", "begin", "come", "clean", "hear"):
                yield from act(home, partner, each)
    yield


@settings(max_examples=60)
@given(st.integers(2, 8), st.lists(st.sampled_from(ACTIONS), max_size=40))
@example(8, ["all", "again", "hear", "begin", "come", "spoil", "hear"])
def test_the_newest_clean_image_of_a_guest_stays_until_a_newer_one_is_there(grown: int, actions: list[str]) -> None:
    home = Home(grown)
    partner = Partner(home)
    best = 0
    try:
        for what in actions:
            for _ in act(home, partner, what):
                best = max(best, partner.known())
                assert partner.clean() >= best, (what, best)
        # And it goes on, however it came about: once the home saves no more, its newest gets here.
        for what in ("save", "clean", "clean", "clean", "clean", *itertools.repeat("", 4)):
            for each in (what, "hear", "break", "begin", "come"):
                for _ in act(home, partner, each):
                    best = max(best, partner.known())
                    assert partner.clean() >= best
        partner.hear()
        assert partner.clean() == max(home.images).step
        ((_, guest),) = partner.guests._guests.items()
        assert not guest.berth.older
    finally:
        partner.guests.close()
