"""An agent's part in a cluster: it reports, serves other agents, and does what the manager says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zerostall.agent.reporter import Reporter
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


class Member:
    """Raises (on construction): CapabilityError when the token cannot be read."""

    def __init__(self, service: Service, settings: MemberSettings) -> None:
        self.reporter = Reporter(service, settings)
        service.stays = True
        self.reporter.start()

    def close(self) -> None:
        self.reporter.close()


def join(service: Service, settings: MemberSettings | None) -> Membership:
    """Begin to take part. Called before the service serves."""
    if settings is None:
        return Alone()
    log.info("node %s of the cluster of %s", settings.node, settings.manager)
    return Member(service, settings)
