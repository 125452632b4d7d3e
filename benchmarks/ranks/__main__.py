"""Many ranks: save and load beside torch.distributed.checkpoint; with CUDA also the stall, added time, and both links.

    python -m benchmarks.ranks                                     gloo, on the CPU
    python -m benchmarks.ranks --device cuda --ranks 2             NCCL: a model of 1.3 B, DDP and FSDP2

Every way of dealing out runs in processes of its own; what they found so far is written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.ranks.rank import Found, rank_main
from benchmarks.report import RESULTS, Report, percentile, seconds
from benchmarks.workload import scratch

WAYS = ("ddp", "fsdp2")
HBM = 4.3e12  # bytes a second that an H200 reads at


def run_way(way: str, options: argparse.Namespace, folder: Path, deadline: float) -> Found | None:
    """One way of dealing out, by ranks of its own; what they found by the deadline."""
    folder.mkdir()
    words = [*("--way", way, "--folder", folder), *("--device", options.device, "--model", options.model)]
    words += [*("--batch", options.batch, "--steps", options.steps, "--pairs", options.pairs)]
    words += [*("--rounds", options.rounds, "--policy", options.policy)]
    words += [flag for flag, on in (("--skip-files", options.skip_files), ("--stalls", options.stalls)) if on]
    ranks = []
    for rank in range(options.ranks):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
        environment.setdefault("ZEROSTALL_AGENT_IDLE", "60")
        if options.device == "cpu":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ranks", *map(str, words)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True))
    try:
        for process in ranks:
            process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"{way}: out of time; what was found until then counts", file=sys.stderr)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    try:
        return Found(**json.loads((folder / "found.json").read_text()))
    except FileNotFoundError:
        return None


def rate(nbytes: float, times: list[float]) -> str:
    middle = statistics.median(times)
    return f"{seconds(middle)} ({seconds(min(times))} to {seconds(max(times))}), {nbytes / middle / 1e9:.2f} GB/s"


def rows(found: Found) -> list[tuple[str, str, str]]:
    """What is told of one way."""
    out: list[tuple[str, str, str]] = []

    def add(what: str, value: str) -> None:
        out.append((found.way, what, value))

    add("state, ranks", f"{found.nbytes / 1e9:.2f} GB, {found.ranks}")
    if found.call:
        floor = found.each / HBM
        add("a step; saves, skipped", f"{seconds(found.step)}; {found.saves}, {found.skipped}")
        for name, times in (("call", found.call), ("thread's wait", found.guard), ("stream's wait", found.inserted)):
            add(f"{name}: median, 99 %", f"{seconds(statistics.median(times))}, {seconds(percentile(times, 0.99))}")
        if found.added:
            added = statistics.median(found.added)
            add("added to the loop a save", f"{seconds(added)}, {added / floor:.2f} of the floor ({seconds(floor)})")
    if found.drained:
        total = found.each * found.ranks / statistics.median(found.drained)
        add("all ranks at once", f"{total / 1e9:.1f} GB/s; plain copies {found.at_once / 1e9:.1f}")
        if found.alone:
            add("one link, plain copy", f"{found.alone / 1e9:.1f} GB/s")
    for verb, times in (("save", found.save), ("load", found.load)):
        for name, taken in times.items():
            add(f"{verb}, {name}", rate(found.nbytes, taken))
        for name, taken in times.items():
            if name != "dcp" and times.get("dcp"):
                ratio = statistics.median(times["dcp"]) / statistics.median(taken)
                add(f"{verb}, {name}: times as fast as dcp", f"{ratio:.2f}")
    return out


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--ways", default="", help=f"some of {', '.join(WAYS)}; on the CPU fsdp2 if nothing is said")
    options.add_argument("--model", default="", help="a size of benchmarks/ranks/loop.py")
    options.add_argument("--batch", type=int, default=0, help="samples a rank and step")
    options.add_argument("--steps", type=int, default=10, help="in a block")
    options.add_argument("--pairs", type=int, default=3, help="of blocks with and without saves")
    options.add_argument("--rounds", type=int, default=3, help="saves and loads beside dcp")
    options.add_argument("--skip-files", action="store_true", help="nothing beside dcp")
    options.add_argument("--stalls", action="store_true", help="saves at every step on the CPU, too")
    options.add_argument("--policy", default="overlap")
    options.add_argument("--seconds", type=float, default=170.0, help="for all of it")
    options.add_argument("--to", type=Path, default=RESULTS, help="folder of the report")
    options.add_argument("--name", default="", help="of the report; ranks or ranks-cuda if nothing is said")
    options.add_argument("--scratch", help="folder to save in")
    options.add_argument("--way", help=argparse.SUPPRESS)
    options.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    cuda = arguments.device == "cuda"
    arguments.model = arguments.model or ("gpt-1.3b" if cuda else "gpt-25m")
    arguments.batch = arguments.batch or (16 if cuda else 1)
    if arguments.way:
        rank_main(arguments)
        return
    ways = arguments.ways.split(",") if arguments.ways else list(WAYS if cuda else WAYS[1:])
    began = time.monotonic()
    with scratch(arguments.scratch) as folder:
        report = Report(
            arguments.name or ("ranks-cuda" if cuda else "ranks"),
            f"{arguments.ranks} ranks of {arguments.model} on {arguments.device}, a save at every step, and beside DCP",
            folder,
            columns=("way", "what", "measured"),
        )
        for index, way in enumerate(ways):
            left = began + arguments.seconds - time.monotonic()
            share = left if index == len(ways) - 1 else left / 2.5  # the last one is compared with dcp, too
            found = run_way(way, arguments, folder / way, time.monotonic() + share)
            if found is None:
                report.notes.append(f"{way}: nothing was found in time")
                continue
            report.rows += rows(found)
            for name in ("call", "guard", "inserted", "added", "drained"):
                report.samples[f"{way}, {name}, s"] = getattr(found, name)
            for verb in ("save", "load"):
                report.samples |= {f"{way}, {verb}, {name}, s": t for name, t in getattr(found, verb).items()}
            shutil.rmtree(folder / way, ignore_errors=True)
        report.notes += [
            "Times are of the slowest rank: the median, and from the fastest to the slowest. Each takes its turn, "
            "another is the first each time, and a first save of each is not counted. Saves count until they are on "
            "disk and fsynced, whoever makes them. Loads begin with nothing in the page cache and no agent: "
            "zerostall's include its start.",
            "dcp is torch.distributed.checkpoint with its defaults, `get_state_dict` and `set_state_dict` included. "
            "With zerostall's Writer and Reader, dcp.save and dcp.load write and read zerostall's files.",
        ]
        if cuda:
            report.notes.append("The floor is what reading the bytes that a GPU stores takes at 4.3 TB/s.")
        path = report.write(arguments.to)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
