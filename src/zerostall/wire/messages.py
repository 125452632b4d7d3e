"""Everything a trainer and its agent say to each other, as typed messages.

A request carries an `id` and is answered by a message with the same id (or by `Refused`). The others are events and
are not answered. File descriptors travel beside a message (see `channel`). Each subject has a file of its own; here
they are one conversation.

    attaching   a trainer comes, and is lent memory        reports    what goes on at the node
    saves       the course of a save                       refusals   what a request that fails is answered with
    restoring   copies and their bytes                     lockers    images in another GPU's memory

    trainer → agent   Hello  Lease  Adopt  Find  Describe  Quote  Fetch  Common  Take  Tidy  Status  Stop   (requests)
                      Doubted (a request of one that is no trainer, as Status and Stop may be)
                      Begin  Sealed  Discarded  Passed  Revoked  Plan  Promise  Release (events; and see `lockers`)
    agent → trainer   Welcome  Leased  Found  Described  Quoted  Fetched  Opened  InCommon  Coming  Arrived  Done
                      Report  Refused (answers)
                      Granted  Reached  Failed  Replaced  Spoiled  Awaiting  Hold  Plan (events)
"""

from __future__ import annotations

from zerostall.wire.attaching import (
    Adopt,
    Done,
    Hello,
    Lease,
    Leased,
    Leave,
    Lent,
    Meeting,
    Nodes,
    RemoteRules,
    Rules,
    Welcome,
)
from zerostall.wire.lockers import Drained, Kept, Locker, NoLocker, NoUse, Rent, Stowed
from zerostall.wire.message import Message
from zerostall.wire.refusals import (
    Refused,
    plain,
    rebuild_error,
)
from zerostall.wire.reports import (
    Doubted,
    Fallback,
    RankReport,
    Report,
    Status,
    Stop,
    Tidy,
    TierReport,
    UpkeepReport,
)
from zerostall.wire.restoring import (
    Arrival,
    Arrived,
    Coming,
    Common,
    CopyFacts,
    Describe,
    Described,
    Fetch,
    Fetched,
    Find,
    Found,
    InCommon,
    Opened,
    Quote,
    Quoted,
    Release,
    Take,
)
from zerostall.wire.saves import (
    Awaiting,
    Begin,
    Discarded,
    Failed,
    Granted,
    Hold,
    Passed,
    Plan,
    Promise,
    Reached,
    Replaced,
    Revoked,
    Sealed,
    Spoiled,
)

__all__ = [
    "PROTOCOL",
    "Adopt",
    "Arrival",
    "Arrived",
    "Awaiting",
    "Begin",
    "Coming",
    "Common",
    "CopyFacts",
    "Describe",
    "Described",
    "Discarded",
    "Done",
    "Doubted",
    "Drained",
    "Failed",
    "Fallback",
    "Fetch",
    "Fetched",
    "Find",
    "Found",
    "FromAgent",
    "FromTrainer",
    "Granted",
    "Hello",
    "Hold",
    "InCommon",
    "Kept",
    "Lease",
    "Leased",
    "Leave",
    "Lent",
    "Locker",
    "Meeting",
    "Message",
    "NoLocker",
    "NoUse",
    "Nodes",
    "Opened",
    "Passed",
    "Plan",
    "Promise",
    "Quote",
    "Quoted",
    "RankReport",
    "Reached",
    "Refused",
    "Release",
    "RemoteRules",
    "Rent",
    "Replaced",
    "Report",
    "Revoked",
    "Rules",
    "Sealed",
    "Spoiled",
    "Status",
    "Stop",
    "Stowed",
    "Take",
    "Tidy",
    "TierReport",
    "UpkeepReport",
    "Welcome",
    "plain",
    "rebuild_error",
]

PROTOCOL = 7

_Request = Hello | Lease | Adopt | Find | Describe | Quote | Fetch | Common | Take | Tidy | Status | Stop | Doubted
FromTrainer = _Request | Begin | Sealed | Discarded | Passed | Revoked | Plan | Promise | Release | Rent | NoUse | Leave
_Found = Found | Described | Quoted | Fetched | Opened | InCommon | Coming | Arrived
_Answer = Welcome | Leased | _Found | Done | Report | Refused
_Event = Granted | Reached | Failed | Replaced | Spoiled | Awaiting | Hold | Plan | Locker | NoLocker | Drained
FromAgent = _Answer | _Event
