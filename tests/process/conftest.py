"""Ranks, a manager and the agents of several nodes for tests that train."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import PATIENT, Agents, Manager, member_environment, use
from conftest import stop_agent
from crash.nursery import Nursery
from hand import close_all
from ranks.world import Ranks, Start, StartOn
from standin.training import Trainer


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """The folder of a run, which is not there yet."""
    return tmp_path / "run"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with contextlib.closing(Nursery("rank", os.environ)) as nursery:
        yield nursery


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path, agent_environment: dict[str, str]) -> Iterator[Start]:
    """Starts the ranks of one attempt after another, on one node."""
    started: list[Ranks] = []

    def start(size: int, scenario: str, *words: object, environment: dict[str, str] | None = None, **options) -> Ranks:
        everybody = {**agent_environment, **(environment or {})}
        started.append(Ranks(nursery, tmp_path, everybody, size, scenario, *words, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


@pytest.fixture
def start_on_stand_in(
    stand_in_driver: Path, agent_environment: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., Trainer]]:
    """Starts trainers of one run, one after the other, whose state is on devices of the stand-in driver."""
    started: list[Trainer] = []

    def start(environment: dict[str, str] | None = None, **options: object) -> Trainer:
        everything = {**agent_environment, "ZEROSTALL_LIBCUDA": str(stand_in_driver), **(environment or {})}
        started.append(Trainer(tmp_path / "run", everything, **options))
        return started[-1]

    yield start
    for trainer in started:
        trainer.kill()
    close_all()


@pytest.fixture
def manager(tmp_path: Path, agent_environment: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Manager]:
    folder = tmp_path / "manager"
    folder.mkdir()
    started = Manager(folder, agent_environment, *getattr(request, "param", PATIENT))
    yield started
    started.close()


@pytest.fixture
def agents(
    manager: Manager,
    tmp_path: Path,
    agent_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
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


@pytest.fixture
def start_on(
    start: Start, manager: Manager, agents: Agents, agent_environment: dict[str, str], tmp_path: Path
) -> StartOn:
    """`agents` ends them."""
    known: set[str] = set()

    def start_on(nodes: tuple[str, ...], scenario: str, *words: object, attempt: int = 0) -> Ranks:
        of_rank = {}
        for number, name in enumerate(nodes):
            if name not in known:
                known.add(name)
                agents(name)
            of_rank[number] = {
                **member_environment(agent_environment, manager, name, tmp_path / name),
                "GROUP_RANK": str(number),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
            }
        environment = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        return start(len(nodes), scenario, tmp_path / "run", *words, of_rank=of_rank, environment=environment)

    return start_on
