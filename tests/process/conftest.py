"""An agent of each test's own for tests that train in their own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import PATIENT, Agents, Manager, member_environment, use
from conftest import stop_agent
from hand import close_all


@pytest.fixture
def own_agent(agent_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process uses an agent of the test's own; its runtime folder."""
    for name in ("ZEROSTALL_RUNTIME_DIR", "ZEROSTALL_AGENT_IDLE"):
        monkeypatch.setenv(name, agent_environment[name])
    return Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])


@pytest.fixture
def manager(tmp_path: Path, agent_environment: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Manager]:
    folder = tmp_path / "manager"
    folder.mkdir()
    started = Manager(folder, agent_environment, *getattr(request, "param", PATIENT))
    yield started
    started.close()


@pytest.fixture
def agents(
    manager: Manager, tmp_path: Path, agent_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Agents]:
    """Makes this process use the agent of a node; its runtime folder."""
    folders: list[Path] = []

    def of(node: str) -> Path:
        folders.append(tmp_path / node)
        return use(member_environment(agent_environment, manager, node, folders[-1]), monkeypatch)

    yield of
    close_all()
    for folder in folders:
        stop_agent(folder)
