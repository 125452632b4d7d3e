"""How fast an image gets into another node's memory, beside what iperf3 moves over the same link.

    python -m benchmarks.replication [--gigabytes 1.0] [--megabits 0,2000,500] [--rounds 3]

Two nodes (network namespaces of this machine) and a manager. A rank seals one image after the other; the other node's
agent fetches each, checks it, and says how long that took. Then iperf3 with one stream uses that very link. 0 megabits:
no bound. Over a slow link images are smaller, so that each is on its way for seconds and not for minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.namespaces import Network, missing
from benchmarks.nodes import Cluster, until
from benchmarks.report import RESULTS, Report, median

_IPERF_SECONDS = 3
_UNBOUNDED = 100_000  # megabits a second: more than any link here
_IMAGE_SECONDS = 3.0
"""An image is that long on its way at most: the rate is steady by then, and a longer one only makes the report late."""
_GOAL = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--megabits", default="0,2000,500")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the report")
    parser.add_argument("--seal", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seal is not None:
        seal(options.seal, options.gigabytes)
        return
    reason = missing() or ("the command iperf3 is missing" if shutil.which("iperf3") is None else None)
    if reason is not None:
        sys.exit(f"replication cannot be measured here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # no node may outlive this process
    with tempfile.TemporaryDirectory(prefix="zerostall-replication-") as name:
        report = Report("replication", "An image to another node's memory", Path(name))
        report.columns = ("link", "image", "zerostall", "iperf3", "share")
        for megabits in map(int, options.megabits.split(",")):
            link = f"{megabits} Mbit/s" if megabits else "no bound"
            gigabytes = size(options.gigabytes, megabits)
            ours, bare = measure(Path(name) / str(megabits), gigabytes, megabits, options.rounds)
            share = median(ours) / median(bare)
            cells = (f"{gigabytes:.2g} GB", f"{median(ours) / 1e9:.2f} GB/s", f"{median(bare) / 1e9:.2f} GB/s")
            report.rows.append((link, *cells, f"{share:.0%}"))
            print(*report.rows[-1], sep=", ", file=sys.stderr, flush=True)
            report.samples |= {f"{link} zerostall bytes": ours, f"{link} iperf3 bytes": bare}
            report.goals[f"{link}: at least {_GOAL:.0%} of iperf3"] = f"{share:.0%}"
        report.notes = [
            f"medians of {options.rounds} images after a first; iperf3 for {_IPERF_SECONDS} s with one stream",
            "every chunk's CRC-32C is checked where it arrives; both nodes and the manager share this machine's cores",
        ]
        print(report.write(options.results).with_suffix(".md").read_text())


def size(gigabytes: float, megabits: int) -> float:
    """Gigabytes of an image for a link of so many megabits a second; 0 for no bound."""
    return min(gigabytes, _IMAGE_SECONDS * megabits * 1e6 / 8 / 1e9) if megabits else gigabytes


def measure(folder: Path, gigabytes: float, megabits: int, rounds: int) -> tuple[list[float], list[float]]:
    """Bytes a second of replicas, and of iperf3, taking turns."""
    folder.mkdir(mode=0o700)
    ours, bare = [], []
    cluster = Cluster(Network(), folder, "n1", "n2", budget=f"{int(gigabytes * 3000) + 256}M")
    try:
        for node in cluster.nodes.values():
            node.slow(megabits or _UNBOUNDED)
        cluster.start_agent("n2")
        until(lambda: cluster.health("n2") == "alive")
        command = [sys.executable, "-m", "benchmarks.replication", "--seal", str(folder / "run")]
        command += ["--gigabytes", str(gigabytes)]
        with (folder / "n1.log").open("a") as log:
            trainer = cluster.nodes["n1"].start(command, cluster.environment("n1"), log, subprocess.PIPE)
        assert trainer.stdout is not None
        with trainer.stdout:
            for step in range(1, rounds + 2):
                said = json.loads(trainer.stdout.readline())
                until(lambda step=step: _here(folder, step) is not None)
                took = _here(folder, step)
                if step > 1:  # the first one finds no memory that has been touched
                    ours.append(said["nbytes"] / took)
                    bare.append(iperf(cluster))
                (folder / "go").write_text(str(step))
        trainer.kill()
        trainer.wait()
    finally:
        cluster.close()
    return ours, bare


def _here(folder: Path, step: int) -> float | None:
    """Seconds that the other node's agent took to fetch a step."""
    log = (folder / "n2" / "agent.log").read_text()
    found = re.search(rf"step {step} of rank 0 is here, ([0-9.]+) s", log)
    return float(found[1]) if found else None


def iperf(cluster: Cluster) -> float:
    """Bytes a second over the same link."""
    there = cluster.nodes["n2"]
    environment = cluster.environment("n2")
    server = there.start(["iperf3", "--server", "--one-off"], environment, subprocess.DEVNULL)
    time.sleep(0.5)
    command = ["iperf3", "--client", there.address, "--time", str(_IPERF_SECONDS), "--json"]
    client = cluster.nodes["n1"].start(command, environment, subprocess.DEVNULL, subprocess.PIPE)
    out, _ = client.communicate(timeout=60)
    server.wait(30)
    return json.loads(out)["end"]["sum_received"]["bits_per_second"] / 8


def seal(where: Path, gigabytes: float) -> None:
    """One rank that seals an image when it is told to."""
    import numpy as np

    import zerostall

    state = {f"{k}": np.random.default_rng(k).random(int(gigabytes * 1e9) // 64) for k in range(8)}
    go = where.parent / "go"
    with zerostall.Checkpointer(where, disk_interval=3600.0, rng=False, state=state) as ckpt:
        for step in itertools.count(1):
            ckpt.save(step, when_busy="wait").wait("host")
            print(json.dumps({"nbytes": sum(part.nbytes for part in state.values())}), flush=True)
            while not go.exists() or go.read_text() != str(step):
                time.sleep(0.02)


if __name__ == "__main__":
    main()
