"""An agent that is told to stop leaves, whenever it hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerostall.agent.door import Door
from zerostall.agent.service import Service
from zerostall.config import AgentSettings

MOMENTS = ("_patience", "_sweep", "_mind_the_door", "_idle_too_long")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_of_a_round_ends_the_loop(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of signals may run between any two steps of the interpreter."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("ZEROSTALL_RUNTIME_DIR", str(tmp_path))
    door = Door(tmp_path)
    service = Service(AgentSettings.from_environment(), door)
    as_ever, rounds = getattr(service, moment), []

    def told() -> object:
        rounds.append(moment)
        assert len(rounds) <= 3, "it goes on"
        service.stop()
        return as_ever()

    monkeypatch.setattr(service, moment, told)
    service.post(lambda: None)  # a round that waits for nothing
    service.serve()
    door.close()
