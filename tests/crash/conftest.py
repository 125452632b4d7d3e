"""What the crash ring shares: warm processes, and an agent of each test's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.nursery import Child, Nursery
from hand import close_all, wait_until
from shim.faults import Shim
from zerostall.wire import rendezvous

StartAgent = Callable[..., Child]


@pytest.fixture(scope="session")
def trainers() -> Iterator[Nursery]:
    """Where trainers come from."""
    with contextlib.closing(Nursery("trainer", os.environ)) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def faulty(shim_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Shim:
    """The fault injector that the agents of this module obey."""
    return Shim(shim_library, tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def agents(faulty: Shim) -> Iterator[Nursery]:
    """Where agents that obey `faulty` come from."""
    with contextlib.closing(Nursery("agent", faulty.environment())) as nursery:
        yield nursery


@pytest.fixture
def folder(own_agent: Path) -> Iterator[Path]:
    """The runtime folder of an agent of this test's own, which this process uses, too."""
    yield own_agent
    close_all()


@pytest.fixture
def start_agent(agents: Nursery, folder: Path, agent_environment: dict[str, str], faulty: Shim) -> Iterator[StartAgent]:
    """Starts an agent that obeys `faulty`, and returns it once it listens."""
    mine: list[Child] = []

    def start(runtime: Path = folder, **more: str) -> Child:
        environment = {**faulty.environment(agent_environment), "ZEROSTALL_RUNTIME_DIR": str(runtime), **more}
        agent = agents.start("--runtime-dir", runtime, environment=environment, output=runtime / "agent.log")
        mine.append(agent)
        wait_until(lambda: agent.ended() or _listens(runtime))
        assert not agent.ended(), agent.printed()
        return agent

    yield start
    for agent in mine:
        agent.kill()


def _listens(runtime: Path) -> bool:
    channel = rendezvous.connect(runtime)
    if channel is None:
        return False
    channel.close()
    return True


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """The folder of the test's run."""
    return tmp_path / "run"
