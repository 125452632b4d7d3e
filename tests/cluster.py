"""A cluster on this machine: a manager and several agents, each with a runtime folder and a node name of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import forked
from crash.nursery import Child
from hand import wait_until
from zerostall.errors import ManagerError
from zerostall.wire import rendezvous, token
from zerostall.wire.manager_link import ManagerLink
from zerostall.wire.state import NodeView, RunView, State

SECONDS = 60.0

# Nodes are heard often. Only where a test loses one is silence short: a machine that is busy must lose none by itself.
PATIENT = ("--interval", "0.1", "--suspect-after", "600", "--lost-after", "900")
QUICK = ("--interval", "0.1", "--suspect-after", "1.0", "--lost-after", "3")

Agents = Callable[[str], Path]
"""Makes this process use the agent of a node; its runtime folder."""


class Manager:
    """A `zerostall manager` process; `restart` gives it the same port and state."""

    def __init__(self, folder: Path, environment: dict[str, str], *options: str) -> None:
        self.folder = folder
        self.token_file = folder / "token"
        self._environment = environment
        self._options = options
        self.port = 0
        self.process: Child | None = None
        self.start()

    def start(self) -> None:
        files = ("--state", self.folder / "state", "--token-file", self.token_file)
        said = self.folder / "said"
        said.unlink(missing_ok=True)
        self.process = process = forked.start(
            "-m", "zerostall.cli", "manager", "--port", self.port, *files, *self._options,
            environment=self._environment, output=said, errors=self.folder / "manager.log",
        )  # fmt: skip
        wait_until(lambda: process.ended() or "\n" in process.printed(), SECONDS)
        found = re.search(r"manager at (https?://\S+?:(\d+));", process.printed())
        assert found, f"{process.printed()!r}\n{self.log()}"
        self.url, self.port = found[1], int(found[2])

    def log(self) -> str:
        return (self.folder / "manager.log").read_text()

    def link(self) -> ManagerLink:
        authorities = self.folder / "certificate.pem"
        return ManagerLink(
            self.url,
            token.read(self.token_file),
            timeout=30.0,
            authorities=authorities if authorities.exists() else None,
        )

    def state(self) -> State:
        link = self.link()
        try:
            return link.get("state", State)
        finally:
            link.close()

    def node(self, name: str) -> NodeView | None:
        return next((node for node in self.state().nodes if node.name == name), None)

    def run(self) -> RunView | None:
        """The one run there is."""
        return next(iter(self.state().runs), None)

    def until_health(self, name: str, health: str) -> None:
        wait_until(lambda: (node := self.node(name)) is not None and node.health == health, SECONDS)

    def until_clean(self, step: int) -> None:
        wait_until(lambda: (run := self.run()) is not None and run.target == step, SECONDS)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def close(self) -> None:
        assert self.process is not None
        self.process.signal(signal.SIGTERM)
        try:
            self.process.wait()
        finally:
            self.kill()


def refused(link: ManagerLink, call: str, message: object) -> str:
    """The kind of refusal that a message meets."""
    try:
        link.post(call, message, object)  # pyright: ignore[reportArgumentType]
    except ManagerError as error:
        return error.kind
    return ""


def member_environment(environment: dict[str, str], manager: Manager, node: str, folder: Path) -> dict[str, str]:
    """What an agent of that node is started with."""
    folder.mkdir(mode=0o700, exist_ok=True)
    return {
        **environment,
        "ZEROSTALL_RUNTIME_DIR": str(folder),
        "ZEROSTALL_MANAGER": manager.url,
        "ZEROSTALL_TOKEN_FILE": str(manager.token_file),
        "ZEROSTALL_NODE": node,
        "ZEROSTALL_HOST_BUDGET": "256M",
        "ZEROSTALL_REPLICA_BUDGET": "256M",
        "ZEROSTALL_PEER": "127.0.0.1",
    }


def use(environment: dict[str, str], monkeypatch) -> Path:
    """Have this process start and reach the agent of that node; its runtime folder."""
    for name, value in environment.items():
        if name.startswith("ZEROSTALL_"):
            monkeypatch.setenv(name, value)
    return Path(os.environ["ZEROSTALL_RUNTIME_DIR"])


def until_replicated(manager: Manager, step: int, ranks: int = 1) -> None:
    def there() -> bool:
        run = manager.run()
        found = next((s for s in run.snapshots if s.step == step), None) if run else None
        return found is not None and found.tiers.get("replica") == ranks

    wait_until(there, SECONDS)


def only_in_memory(where: Path) -> None:
    """The disk has lost its steps."""
    for folder in where.glob("step-*"):
        shutil.rmtree(folder)


def joined(manager: Manager, agents: Agents, *names: str) -> dict[str, Path]:
    """Agents of these nodes, all of them known to the manager; this process uses the last one's."""
    folders = {}
    for name in names:
        folders[name] = agents(name)
        rendezvous.connect_or_start(folders[name]).close()
    for name in names:
        manager.until_health(name, "alive")
    return folders
