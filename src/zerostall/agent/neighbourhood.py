"""The other nodes of the cluster, as this one knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostall.agent.replication import Replication
    from zerostall.agent.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What brings images from there, and what says where they are.

    Attributes:
        node: this one.
    """

    node: str
    replication: Replication
    whereabouts: Whereabouts
