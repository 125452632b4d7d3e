"""Where images are, as the manager knows: asked when somebody wants one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from zerostall.wire import cluster as w
from zerostall.wire.manager_link import ManagerLink

if TYPE_CHECKING:
    import msgspec

    from zerostall.config import MemberSettings

Answer = TypeVar("Answer")

PATIENCE_SECONDS = 2.0


def connection(settings: MemberSettings, secret: str, timeout: float = PATIENCE_SECONDS) -> ManagerLink:
    """To the manager of this node."""
    return ManagerLink(settings.manager, secret, timeout=timeout, authorities=settings.authorities)


class Whereabouts:
    """Any thread: each question has a connection of its own."""

    def __init__(self, settings: MemberSettings, secret: str) -> None:
        self._settings = settings
        self._secret = secret

    def whereis(self, run: str, rank: int) -> tuple[w.LocatedCopy, ...]:
        """Copies of a rank's images on other nodes.

        Raises:
            ManagerError: the manager cannot be reached.
        """
        return self._located(w.WhereIs(self._settings.node, run, rank))

    def whereis_all(self, run: str, step: int) -> tuple[w.LocatedCopy, ...]:
        """Copies of all ranks' images of a step, on this node, too; as `whereis`."""
        return self._located(w.WhereIs(self._settings.node, run, 0, step, everybody=True))

    def heir(self, where: str, name: str, asked: float) -> w.Inherited:
        """Which run an empty folder goes on with; as `whereis`."""
        return self._asked_once("heir", w.Empty(self._settings.node, where, name, asked), w.Inherited)

    def _located(self, question: w.WhereIs) -> tuple[w.LocatedCopy, ...]:
        return self._asked_once("whereis", question, w.Located).copies

    def _asked_once(self, path: str, question: msgspec.Struct, kind: type[Answer]) -> Answer:
        link = connection(self._settings, self._secret)
        try:
            return link.post(path, question, kind)
        finally:
            link.close()
