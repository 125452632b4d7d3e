"""One manager under thousands of simulated agents: real messages over loopback, one process for all agents.

    python -m benchmarks.manager_load --agents 2048 --ranks 8 --seconds 60

Each agent joins, sends a heartbeat a second, says what it holds whenever that changes (a step is sealed every ten
seconds and replicated where the manager's plan says), and follows the answers. In the middle some of them fall silent
at once. What is reported: how long decisions and heartbeats took, the manager's processor time and memory, and how
long after the last heartbeat of a lost node the manager had decided.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from benchmarks import machine
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
    late: int = 0
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
        self._load.late += took > 1.0
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


async def _all(load: Load, seconds: float, lose: int) -> float:
    """Every agent for so long; when some fell silent."""
    load.began = time.monotonic()
    load.until = load.began + seconds
    agents = asyncio.gather(*(Agent(load, number).run() for number in range(load.agents)))
    await asyncio.sleep(seconds / 2)
    load.silent, load.stopped = set(range(7, 7 + lose)), time.monotonic()
    silent_at = time.time()
    await agents
    return silent_at


def measure(agents: int, ranks: int, seconds: float, lose: int) -> dict[str, object]:
    """Run a manager and its agents; the figures."""
    with tempfile.TemporaryDirectory() as folder:
        secret_file = Path(folder) / "token"
        command = [sys.executable, "-m", "zerostall.cli", "manager", "--port", "0"]
        command += ["--state", f"{folder}/state", "--token-file", str(secret_file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                figures = _figures(process, secret_file, agents, ranks, seconds, lose)
            finally:
                process.terminate()
    return figures


def _figures(
    process: subprocess.Popen[str], secret_file: Path, agents: int, ranks: int, seconds: float, lose: int
) -> dict[str, object]:
    assert process.stdout is not None
    url = process.stdout.readline().split()[2].rstrip(";")
    load = Load(urlsplit(url).port or 0, token.read(secret_file), agents, ranks)
    watched = psutil.Process(process.pid)
    before, start = watched.cpu_times(), time.monotonic()
    silent_at = asyncio.run(_all(load, seconds, lose))
    wall, after = time.monotonic() - start, watched.cpu_times()
    memory = watched.memory_info().rss
    link = ManagerLink(url, load.secret, timeout=60.0)
    state = link.get("state", State)
    link.close()
    lost = [event.at for event in state.events if "→ lost" in event.text]
    back = [event.at for event in state.events if event.kind == "rollback"]
    cpu = after.user + after.system - before.user - before.system
    latencies = sorted(load.latencies)
    return {
        "agents": agents,
        "ranks": agents * ranks,
        "seconds": round(wall, 1),
        "heartbeats_per_second": round(len(latencies) / wall, 1),
        "decision_p99_ms": round(state.decision_ms, 2),
        "heartbeat_median_ms": round(statistics.median(latencies) * 1e3, 2),
        "heartbeat_p99_ms": round(latencies[int(len(latencies) * 0.99)] * 1e3, 2),
        "later_than_a_second": load.late,
        "manager_cores": round(cpu / wall, 3),
        "rss_mib": round(memory / 2**20, 1),
        "received_kib_per_second": round(load.sent_bytes / wall / 1024, 1),
        "newest_clean_step": state.runs[0].target if state.runs else None,
        "silent_to_lost_s": round(max(lost) - silent_at, 2) if lost else None,
        "silent_to_rollback_s": round(min(back) - silent_at, 2) if back else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8, help="of each agent")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--lose", type=int, default=3, help="agents that fall silent half-way")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    found = {
        **machine.hardware(),
        **machine.versions(),
        **measure(options.agents, options.ranks, options.seconds, options.lose),
    }
    text = json.dumps(found, indent=2, default=str)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
