"""Whether an agent takes part in a cluster; see `member`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zerostall.telemetry import log

if TYPE_CHECKING:
    from zerostall.agent.service import Service
    from zerostall.config import MemberSettings


class Membership(Protocol):
    def close(self) -> None: ...


class Alone:
    """No manager is named: the agent is on its own."""

    def close(self) -> None:
        pass


def join(service: Service, settings: MemberSettings | None) -> Membership:
    """Begin to take part. Called before the service serves."""
    if settings is None:
        return Alone()
    from zerostall.agent.member import Member  # a third of what an agent imports, and most are on their own

    log.info("node %s of the cluster of %s", settings.node, settings.manager)
    return Member(service, settings)
