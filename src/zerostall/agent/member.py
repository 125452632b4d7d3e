"""An agent that belongs to a cluster: it reports, serves other agents, and does what the manager says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.agent.elsewhere import Elsewhere
from zerostall.agent.holdings import take_census
from zerostall.agent.neighbourhood import Neighbourhood
from zerostall.agent.replication import Replication
from zerostall.agent.reporter import Reporter
from zerostall.agent.whereabouts import Whereabouts
from zerostall.wire import token

if TYPE_CHECKING:
    from zerostall.agent.holdings import Census
    from zerostall.agent.service import Service
    from zerostall.config import MemberSettings


class Member:
    """Raises (on construction): CapabilityError when the token cannot be read or the node cannot listen for others."""

    def __init__(self, service: Service, settings: MemberSettings) -> None:
        secret = token.read(settings.token_file)
        self._service = service
        self._replication: Replication | None = None
        if settings.peer:
            self._replication = Replication(service.runs, settings, secret, service.upkeep.doubt, service.post)
        self._reporter = Reporter(service.post, settings, secret, self._look, self._replication, service.upkeep)
        if self._replication is not None:
            neighbourhood = Neighbourhood(settings.node, self._replication, Whereabouts(settings, secret))
            service.elsewhere = Elsewhere(neighbourhood, service.post)
            service.upkeep.join(neighbourhood)
        service.stays = True
        self._reporter.start()

    def close(self) -> None:
        self._service.upkeep.close()  # it reads what is about to be given back
        self._reporter.close()
        if self._replication is not None:
            self._replication.close()
            self._replication.guests.close()

    def _look(self) -> Census:
        """On the loop."""
        return take_census(self._service.runs, self._replication.notes() if self._replication else ())
