"""An agent of each test's own for tests that train in their own process."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_agent(agent_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process uses an agent of the test's own; its runtime folder."""
    for name in ("ZEROSTALL_RUNTIME_DIR", "ZEROSTALL_AGENT_IDLE"):
        monkeypatch.setenv(name, agent_environment[name])
    return Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])
