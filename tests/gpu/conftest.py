"""An agent of each test's own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_agent(agent_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZEROSTALL_RUNTIME_DIR", "ZEROSTALL_AGENT_IDLE"):
        monkeypatch.setenv(name, agent_environment[name])
