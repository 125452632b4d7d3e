"""What a rank's images on other GPUs have to do with the rank itself, and with its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.agent.client import Client
    from zerostall.agent.wish import Wish
    from zerostall.core.candidates import Past
    from zerostall.core.manifest import Record
    from zerostall.core.roll import Save
    from zerostall.tiers.host import HostTier
    from zerostall.wire import messages as m


class Owner(Protocol):
    """The rank whose images these are, as `berth.Berth` has it."""

    rank: int
    current: HostTier | None
    client: Client | None

    def send(self, message: m.Message) -> None:
        """Tell the trainer, if there is one."""


@dataclass(frozen=True, slots=True)
class Quay:
    """Where images arrive: what the rank's run does with those that are in host memory, or will not be.

    Attributes:
        seal: the image in a slot is whole.
        passed: the rank goes on without a save, and why.
        promise: somebody waits for an image in a slower tier.
        idle: nothing is on its way any more.
        advance: something has come free: do whatever can be done now.
    """

    seal: Callable[[int, Record, Wish], None]
    passed: Callable[[Save, str], None]
    promise: Callable[[Past, str], None]
    idle: Callable[[], None]
    advance: Callable[[], None]
