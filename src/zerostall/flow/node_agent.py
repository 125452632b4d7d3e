"""Asking this node's agent, as those do who are no trainer: what it holds; and telling it what is damaged."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zerostall.config import runtime_dir
from zerostall.errors import AgentError
from zerostall.wire import messages as m
from zerostall.wire import rendezvous

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.wire.channel import Channel

ANSWER_SECONDS = 30.0


def ask(channel: Channel[m.FromAgent], request: m.Status | m.Stop | m.Doubted) -> m.FromAgent:
    """Its answer to one request; a refusal is raised as what it was.

    Raises:
        AgentError: no answer within `ANSWER_SECONDS`.
    """
    channel.socket.settimeout(ANSWER_SECONDS)
    channel.send(request)
    while True:
        for message, _ in channel.receive():
            if isinstance(message, m.Refused):
                raise message.error()
            return message


def ask_status(channel: Channel[m.FromAgent]) -> m.Report:
    """The agent's report."""
    report = ask(channel, m.Status(id=1))
    if not isinstance(report, m.Report):
        raise AgentError(f"the agent answered {type(report).__name__} when asked for its status")
    return report


def report_of_node() -> m.Report | None:
    """What the node's agent reports; None where none runs."""
    channel = rendezvous.connect(runtime_dir())
    if channel is None:
        return None
    try:
        return ask_status(channel)
    finally:
        channel.close()


def told_of_damage(where: Path, steps: Sequence[tuple[int, str]]) -> bool:
    """Tell the node's agent, if it has this run, that these steps on disk are damaged; whether it has heard that."""
    channel = rendezvous.connect(runtime_dir())
    if channel is None:
        return False
    try:
        if all(rank.where != str(where) for rank in ask_status(channel).ranks):
            return False
        told = tuple((step, m.plain(why)) for step, why in steps)
        return isinstance(ask(channel, m.Doubted(id=2, where=os.fsencode(where), steps=told)), m.Done)
    finally:
        channel.close()
