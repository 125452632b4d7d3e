"""A cluster of nodes on this machine: a manager, agents, and a trainer that says what it does.

    python -m benchmarks.nodes FOLDER --gigabytes G [--until STEP]      is the trainer

The trainer's weights depend on nothing but the number of steps, so any two of its runs can be compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from benchmarks.machine import ROOT
from benchmarks.namespaces import Network
from zerostall.wire import token
from zerostall.wire.manager_link import ManagerLink
from zerostall.wire.state import RunView, State

MANAGER_PORT = 7077
_PATIENCE = 120.0


class Cluster:
    """A network with a manager and nodes; ended by `close`.

    Args:
        options: of the manager.
        budget: of each node's host memory, and as much for replicas.
    """

    def __init__(self, network: Network, folder: Path, *names: str, options: tuple[str, ...] = (), budget: str) -> None:
        self.network = network
        self.folder = folder
        self._options = options
        self._budget = budget
        self._token_file = folder / "token"
        self._host = network.add("manager")
        self._url = f"http://{self._host.address}:{MANAGER_PORT}"
        self._manager: subprocess.Popen[str] | None = None
        self._trainers: list[Trainer] = []
        self.nodes = {name: network.add(name) for name in names}
        self.start_manager()

    def start_manager(self) -> None:
        command = [sys.executable, "-m", "zerostall.cli", "manager", "--host", self._host.address]
        command += ["--port", str(MANAGER_PORT), "--state", str(self.folder / "manager")]
        command += ["--token-file", str(self._token_file), *self._options]
        with (self.folder / "manager.log").open("a") as log:
            self._manager = self._host.start(command, plain_environment(), log, subprocess.PIPE)
        assert self._manager.stdout is not None
        self._manager.stdout.readline()  # it says where it listens

    def kill_manager(self) -> None:
        assert self._manager is not None
        self._manager.kill()
        _gone(self._manager)

    def close(self) -> None:
        for trainer in self._trainers:
            trainer.kill()
        self.kill_manager()
        self.network.close()

    def state(self) -> State:
        """The manager's view."""
        with self._host.inside():
            link = ManagerLink(
                f"http://{self._host.address}:{MANAGER_PORT}", token.read(self._token_file), timeout=10.0
            )
            try:
                return link.get("state", State)
            finally:
                link.close()

    def run(self) -> RunView | None:
        """The one run there is."""
        return next(iter(self.state().runs), None)

    def health(self, name: str) -> str:
        return next((node.health for node in self.state().nodes if node.name == name), "unknown")

    def holder(self) -> str | None:
        """A living node with a replica."""
        return next((node.name for node in self.state().nodes if node.health == "alive" and node.replicas > 0), None)

    def environment(self, name: str) -> dict[str, str]:
        """What a process of that node is started with."""
        runtime = self.folder / name
        runtime.mkdir(mode=0o700, exist_ok=True)
        return {
            **plain_environment(),
            "ZEROSTALL_RUNTIME_DIR": str(runtime),
            "ZEROSTALL_MANAGER": self._url,
            "ZEROSTALL_TOKEN_FILE": str(self._token_file),
            "ZEROSTALL_NODE": name,
            "ZEROSTALL_PEER": self.nodes[name].address,
            "ZEROSTALL_HOST_BUDGET": self._budget,
            "ZEROSTALL_REPLICA_BUDGET": self._budget,
        }

    def start_agent(self, name: str) -> None:
        """Return when the node's agent serves."""
        command = [sys.executable, "-m", "zerostall.cli", "agent", "start"]
        with (self.folder / f"{name}.log").open("a") as log:
            started = self.nodes[name].start(command, self.environment(name), log)
        if code := started.wait(_PATIENCE):
            raise RuntimeError(f"no agent on {name}: it ended with {code}; see {self.folder / name}.log")

    def agent(self, name: str) -> int:
        """The number of the node's agent process."""
        for process in self.nodes[name].processes():
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if b"zerostall.agent" in words:
                return process
        raise RuntimeError(f"no agent runs on {name}")

    def train(self, name: str, where: Path, gigabytes: float) -> Trainer:
        """Start to train on that node, or go on."""
        command = [sys.executable, "-m", "benchmarks.nodes", str(where), "--gigabytes", str(gigabytes)]
        with (self.folder / f"{name}.log").open("a") as log:
            process = self.nodes[name].start(command, self.environment(name), log, subprocess.PIPE)
        trainer = Trainer(process)
        self._trainers.append(trainer)
        return trainer


class Trainer:
    """A trainer's process, and what it says, read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._said: IO[str] = process.stdout  # pyright: ignore[reportAttributeAccessIssue] - it is a pipe
        self.last_step = 0

    def until(self, what: str, at_least: int = 0) -> dict:
        """The next line that says so, of that step or a later one.

        Raises:
            RuntimeError: the trainer ended first.
        """
        for line in self._said:
            try:
                said = json.loads(line)
            except ValueError:
                break  # it was killed while it spoke
            self.last_step = max(self.last_step, said.get("step", 0))
            if said["what"] == what and said.get("step", 0) >= at_least:
                return said
        raise RuntimeError(f"the trainer ended with {self._process.wait(_PATIENCE)}")

    def kill(self) -> int:
        """The last step it has spoken of."""
        self._process.kill()
        try:
            self.until("the end")
        except RuntimeError:
            pass
        except ValueError:  # closed already
            return self.last_step
        self._said.close()
        return self.last_step


def undisturbed(folder: Path, gigabytes: float, steps: int) -> object:
    """The digest of the weights after so many steps if nothing happens."""
    command = [sys.executable, "-m", "benchmarks.nodes", str(folder / "undisturbed")]
    command += ["--gigabytes", str(gigabytes), "--until", str(steps), "--bare"]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["digest"]


def plain_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def until(true: Callable[[], object]) -> None:
    """Raises TimeoutError after two minutes."""
    deadline = time.monotonic() + _PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_PATIENCE:.0f} s")
        time.sleep(0.02)


def _gone(process: subprocess.Popen[str]) -> None:
    process.wait(_PATIENCE)
    if process.stdout is not None:
        process.stdout.close()


def train(where: Path, gigabytes: float, last: int, *, bare: bool) -> None:
    """One rank: weights and momentum of so many bytes, a save after each step (unless `bare`)."""
    import torch

    import zerostall
    from zerostall.native import crc32c_memory

    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = int(gigabytes * 1e9) // 8 // 8
    weights = [torch.nn.Parameter(torch.randn(count)) for _ in range(8)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    targets = torch.randn(count)

    def step_once() -> None:
        for weight in weights:
            weight.grad = weight.detach() - targets
        optimizer.step()

    def digest() -> list[int]:
        return [crc32c_memory(weight.data_ptr(), weight.nbytes) for weight in weights]

    def say(what: str, **more: object) -> None:
        print(json.dumps({"what": what, "at": time.time(), **more}), flush=True)

    say("ready")
    if bare:
        for _ in range(last):
            step_once()
        say("step", step=last, digest=digest())
        return
    with zerostall.Checkpointer(where, model=torch.nn.ParameterList(weights), optimizer=optimizer) as ckpt:
        step = ckpt.restore()
        say("restored", step=step, **{"from": ckpt.stats.restored_from or "nothing"})
        while step < last:
            step_once()
            step += 1
            say("step", step=step, digest=digest())
            ckpt.save(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--until", type=int, default=1_000_000)
    parser.add_argument("--bare", action="store_true", help="no checkpoints")
    options = parser.parse_args()
    train(options.folder, options.gigabytes, options.until, bare=options.bare)


if __name__ == "__main__":
    main()
