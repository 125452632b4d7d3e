"""One manager under thousands of simulated agents: real messages over loopback, one process for all agents.

    python -m benchmarks.manager_load [--stores sqlite,etcd] [--agents 2048] [--ranks 8] [--seconds 60]

Each agent joins, sends a heartbeat a second, says what it holds whenever that changes (a step is sealed every ten
seconds and replicated where the manager's plan says), and follows the answers. In the middle some of them fall silent
at once. What is reported: how long decisions and heartbeats took, the manager's processor time and memory, and how
long after the last heartbeat of a lost node the manager had decided.

The manager has one core for itself; the agents, and etcd, have the others. What they cost is reported beside: when the
agents' own loop is late, heartbeats are, and the manager is not to blame. `etcd` starts a member in a temporary
folder; an etcd://... URL of your own is taken as it is, under a prefix that nobody else uses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from benchmarks.report import RESULTS, Report, median, percentile, seconds
from zerostall.errors import ManagerError
from zerostall.wire import cluster as w
from zerostall.wire import token
from zerostall.wire.manager_link import ManagerLink
from zerostall.wire.state import State

STEP_SECONDS = 10.0
IMAGE_BYTES = 1 << 30
SLOTS = 2


@dataclass
class Load:
    """What all simulated agents share."""

    port: int
    secret: str
    agents: int
    ranks: int
    until: float = 0.0
    silent: set[int] = field(default_factory=set)
    latencies: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    began: float = 0.0

    stopped: float = float("inf")  # when nodes fell silent: no rank finishes another step without theirs

    def step(self, now: float) -> int:
        return int((min(now, self.stopped) - self.began) / STEP_SECONDS)


class Agent:
    """One node: what it holds follows from the clock and its plan."""

    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        self._number = number
        self._name = f"node-{number:05}"
        self._plan = w.Plan(0)
        self._version = self._told = self._sequence = 0
        self._heard = -1
        self._held: tuple[w.RunNote, ...] = ()

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._load.port)
        self._reader, self._writer = reader, writer
        labels = f"rack=r{self._number // 16},leaf=l{self._number // 32}"
        peer = f"10.{self._number >> 8 & 255}.{self._number & 255}.1:7400"
        join = w.Join(node=self._name, instance=self._name, labels=labels, peer=peer, offers=64 * IMAGE_BYTES)
        joined = msgspec.json.decode(await self._post("join", join), type=w.Joined)
        turn = time.monotonic() + (self._number % 1000) / 1000
        while turn < self._load.until:
            await asyncio.sleep(max(0.0, turn - time.monotonic()))
            if self._number in self._load.silent:
                break
            self._load.lags.append(time.monotonic() - turn)
            await self._beat(joined.epoch)
            turn += 1.0
        writer.close()

    async def _beat(self, epoch: int) -> None:
        start = time.monotonic()
        self._look(start)
        self._sequence += 1
        report = w.Report(
            node=self._name,
            epoch=epoch,
            sequence=self._sequence,
            version=self._version,
            held=self._held if self._told != self._version else None,
            plan=self._plan.version,
            heard=self._heard,
            host_bytes=self._load.ranks * SLOTS * IMAGE_BYTES,
        )
        answer = msgspec.json.decode(await self._post("report", report), type=w.Answer)
        took = time.monotonic() - start
        self._load.latencies.append(took)
        self._told, self._heard = self._version, answer.sequence
        if answer.tell_all:
            self._told = -1
        if answer.plan is not None:
            self._plan = answer.plan

    def _look(self, now: float) -> None:
        step = self._load.step(now)
        # Ranks seal within a second of one another; replicas follow a second later.
        since = min(now, self._load.stopped) - self._load.began - step * STEP_SECONDS
        mine = step if since > (self._number % 10) / 10 else step - 1
        theirs = step if since > 2.0 else step - 1
        first = self._number * self._load.ranks
        ranks = [
            w.RankNote(rank, True, True, _copies("host", mine), IMAGE_BYTES)
            for rank in range(first, first + self._load.ranks)
        ]
        ranks += [w.RankNote(guest.rank, False, False, _copies("replica", theirs)) for guest in self._plan.guests]
        world = self._load.agents * self._load.ranks
        held = (w.RunNote("run", "/checkpoints/run", world, tuple(ranks)),)
        if held != self._held:
            self._held, self._version = held, self._version + 1

    async def _post(self, call: str, message: msgspec.Struct) -> bytes:
        body = msgspec.json.encode(message)
        head = (
            f"POST /v1/{call} HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {self._load.secret}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._load.sent_bytes += len(body)
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", answer)
        assert length is not None, answer
        data = await self._reader.readexactly(int(length[1]))
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{self._name}: {data.decode()}")
        return data


def _copies(tier: str, newest: int) -> tuple[w.CopyNote, ...]:
    steps = range(max(0, newest - SLOTS + 1), newest + 1)
    return tuple(w.CopyNote(step, "1.0", tier, float(step), IMAGE_BYTES) for step in steps)


async def _all(load: Load, duration: float, lose: int) -> float:
    """Every agent for so long; when some fell silent."""
    load.began = time.monotonic()
    load.until = load.began + duration
    agents = asyncio.gather(*(Agent(load, number).run() for number in range(load.agents)))
    await asyncio.sleep(duration / 2)
    load.silent, load.stopped = set(range(7, 7 + lose)), time.monotonic()
    silent_at = time.time()
    await agents
    return silent_at


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A member on loopback: its URL and its process."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports.append(listener.getsockname()[1])
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    command = ["etcd", "--name", "m0", "--data-dir", str(folder / "etcd"), "--initial-cluster", f"m0={peer}"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    with (folder / "etcd.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"etcd://{urlsplit(client).netloc}/load", psutil.Process(process.pid)
        finally:
            process.kill()


@dataclass
class Measured:
    """What one run showed; times in seconds."""

    decision_p99: float
    latencies: list[float]
    lags: list[float]
    cores: dict[str, float]
    peak: int
    received: float
    lost: float | None
    rollback: float | None
    target: int | None


def measure(store: str, agents: int, ranks: int, duration: float, lose: int) -> Measured:
    """Run a manager and its agents."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zerostall-load-")))
        ours = sorted(os.sched_getaffinity(0))
        command = [sys.executable, "-m", "zerostall.cli", "manager", "--port", "0"]
        command += ["--state", str(folder / "state"), "--token-file", str(folder / "token")]
        watched: dict[str, psutil.Process] = {}
        if store != "sqlite":
            url = store
            if store == "etcd":
                url, watched["etcd"] = stack.enter_context(etcd(folder))
            command += ["--store", url]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        watched |= {"manager": psutil.Process(process.pid), "agents": psutil.Process()}
        if len(ours) > 1:
            stack.callback(os.sched_setaffinity, 0, ours)
            os.sched_setaffinity(process.pid, ours[-1:])
            for name in watched.keys() - {"manager"}:
                os.sched_setaffinity(watched[name].pid, ours[:-1])
        return _measured(process, folder / "token", Load(0, "", agents, ranks), watched, duration, lose)


def _measured(
    process: subprocess.Popen[str],
    secret: Path,
    load: Load,
    watched: dict[str, psutil.Process],
    duration: float,
    lose: int,
) -> Measured:
    assert process.stdout is not None
    url = process.stdout.readline().split()[2].rstrip(";")
    load.port, load.secret = urlsplit(url).port or 0, token.read(secret)
    link = ManagerLink(url, load.secret, timeout=60.0)
    _until_it_leads(link)
    before, start = {name: _processor(each) for name, each in watched.items()}, time.monotonic()
    silent_at = asyncio.run(_all(load, duration, lose))
    wall = time.monotonic() - start
    cores = {name: (_processor(each) - before[name]) / wall for name, each in watched.items()}
    state = link.get("state", State)
    link.close()
    lost = [event.at for event in state.events if "→ lost" in event.text]
    back = [event.at for event in state.events if event.kind == "rollback"]
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    return Measured(
        decision_p99=state.decision_ms / 1e3,
        latencies=load.latencies,
        lags=load.lags,
        cores=cores,
        peak=int(peak[1]) << 10,
        received=load.sent_bytes / wall,
        lost=max(lost) - silent_at if lost else None,
        rollback=min(back) - silent_at if back else None,
        target=state.runs[0].target if state.runs else None,
    )


def _until_it_leads(link: ManagerLink) -> None:
    """With etcd a manager stands by first."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            link.get("state", State)
            return
        except ManagerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _processor(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", default="sqlite", help="sqlite, etcd, or an etcd:// URL; several with commas")
    parser.add_argument("--agents", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8, help="of each agent")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--lose", type=int, default=3, help="agents that fall silent half-way")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the report")
    options = parser.parse_args()
    stores = options.stores.split(",")
    if "etcd" in stores and shutil.which("etcd") is None:
        sys.exit("the manager's load with etcd cannot be measured here: the command etcd is missing (etcd-server)")
    with tempfile.TemporaryDirectory(prefix="zerostall-load-") as name:
        world = options.agents * options.ranks
        title = f"One manager, {options.agents} agents with {world} ranks, a step every {STEP_SECONDS:.0f} s"
        report = Report("manager_load", title, Path(name))
        report.columns = ("", *stores)
        found = {
            store: measure(store, options.agents, options.ranks, options.seconds, options.lose) for store in stores
        }
        rows = {store: table(each, options.seconds) for store, each in found.items()}
        report.rows = [(row, *(rows[store][row] for store in stores)) for row in rows[stores[0]]]
        for store, each in found.items():
            judge(report, store, each)
        report.notes = [
            f"{options.seconds:.0f} s a store; {options.lose} agents fall silent together half-way",
            "the manager has one core for itself; the agents, one process, and etcd share the others",
            "a heartbeat's time is that from its sending to its answer, of which the agents' own loop is a part",
        ]
        print(report.write(options.results).with_suffix(".md").read_text())


def table(found: Measured, duration: float) -> dict[str, str]:
    """What is shown of one store, by row."""

    def after(silence: float | None) -> str:
        return "never" if silence is None else f"{silence:.1f} s"

    return {
        "a decision, 99th percentile": seconds(found.decision_p99),
        "heartbeats a second": f"{len(found.latencies) / duration:.0f}",
        "a heartbeat, median": seconds(median(found.latencies)),
        "a heartbeat, 99th percentile": seconds(percentile(found.latencies, 0.99)),
        "heartbeats that took over a second": str(sum(latency > 1.0 for latency in found.latencies)),
        "the manager hears": f"{found.received / 1024:.0f} KiB/s",
        "the manager's processor": f"{found.cores['manager']:.2f} cores",
        "its memory, at most": f"{found.peak / 2**20:.0f} MiB",
        "etcd's processor": f"{found.cores['etcd']:.3f} cores" if "etcd" in found.cores else "–",
        "the agents' processor": f"{found.cores['agents']:.2f} cores",
        "the agents' own delay, 99th percentile": seconds(percentile(found.lags, 0.99)),
        "silence → lost": after(found.lost),
        "silence → rollback decided": after(found.rollback),
        "newest clean step": str(found.target),
    }


def judge(report: Report, store: str, found: Measured) -> None:
    """Add the goals, and the heartbeats' times to look at."""
    report.goals |= {
        f"{store}: decisions under 100 ms, 99th percentile": seconds(found.decision_p99),
        f"{store}: one core": f"{found.cores['manager']:.2f} cores",
        f"{store}: under 500 MiB": f"{found.peak / 2**20:.0f} MiB",
    }
    ordered = sorted(found.latencies)
    report.samples[f"{store} heartbeat percentiles 0, 1 ... 100 seconds"] = [
        ordered[min(len(ordered) - 1, len(ordered) * k // 100)] for k in range(101)
    ]


if __name__ == "__main__":
    main()
