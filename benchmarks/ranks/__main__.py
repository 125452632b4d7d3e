"""Many ranks: the stall and the added time of a save at every step, all links at once; save and load beside DCP.

    python -m benchmarks.ranks                                     gloo, on the CPU, beside DCP only
    python -m benchmarks.ranks --ways ddp,fsdp2 --model tiny       gloo, what is measured on devices
    python -m benchmarks.ranks --device cuda --ranks 2             NCCL: a model of 1.3 B, DDP and FSDP2
    ... --ways fsdp2,2d --every 1,5 --systems zerostall,dcp-stager FSDP2 x TP, too; how often; and another's saves
    ... --ways fsdp2 --systems zerostall,plain-copies              what copying alone costs such a loop
    ... --ways ring,pairs,straight                                 saves through other GPUs' memory beside collectives
    ... --ways ddp,fsdp2 --scratch /dev/shm                        the first save, which goes to disk, takes less time

Every way of dealing out runs in processes of its own; what they found so far is written after each. With `dcp` the
model is a smaller one on devices, dealt out with FSDP2, since the disk is what takes the time then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import ROOT, end_on_signals
from benchmarks.ranks.found import OURS, Found
from benchmarks.ranks.neighbours import SHAPES, Between
from benchmarks.ranks.rank import rank_main
from benchmarks.ranks.together import end_agent
from benchmarks.report import RESULTS, Report
from benchmarks.workload import scratch

WAYS = ("ddp", "fsdp2", "dcp")
TRAINED = ("ddp", "fsdp2", "2d")
MORE = ("2d", *SHAPES)  # where they are asked for
FILES = "dcp"
GRACE = 4.0  # seconds for ranks that have used up their time


def run_way(
    way: str, system: str, options: argparse.Namespace, folder: Path, deadline: float
) -> Sequence[Found | Between]:
    """One way of dealing out, by ranks of its own; what they found by the deadline."""
    folder.mkdir()
    model = options.files_model if way == FILES else options.model
    words = [*("--way", way, "--system", system, "--folder", folder), *("--device", options.device, "--model", model)]
    words += [*("--batch", options.batch, "--every", options.every, "--pairs", options.pairs)]
    words += [*("--rounds", options.rounds, "--policy", options.policy)]
    begin = time.monotonic()
    words += ["--begin", begin, "--seconds", max(1.0, deadline - GRACE - begin)]
    ranks = []
    for rank in range(options.ranks):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
        environment.setdefault("ZEROSTALL_AGENT_IDLE", "60")
        # As where it is installed: no agent compiles its modules anew.
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
        if options.device == "cpu":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ranks", *map(str, words)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True))
    try:
        while any(process.poll() is None for process in ranks):
            if time.monotonic() > deadline or any(process.returncode for process in ranks):
                print(f"{way}: out of time or a rank failed; what was found until then counts", file=sys.stderr)
                break
            time.sleep(0.1)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end_agent()
    try:
        found = json.loads((folder / "found.json").read_text())
    except FileNotFoundError:
        return []
    return [(Between if way in SHAPES else Found)(**one) for one in found]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument(
        "--ways",
        default="",
        help=f"some of {', '.join((*WAYS, *MORE))}; if nothing is said {', '.join(WAYS)}, on the CPU dcp",
    )
    options.add_argument("--model", default="", help="a size of benchmarks/ranks/loop.py")
    options.add_argument("--files-model", default="", help="the size that is saved and loaded beside dcp")
    options.add_argument("--batch", type=int, default=0, help="samples a rank and step; as the drain fits, if 0")
    options.add_argument("--every", default="1", help="steps from a save to the next, each of these in turn")
    options.add_argument("--systems", default=OURS, help="that save, each by itself; others by name: benchmarks/peers")
    options.add_argument("--pairs", type=int, default=8, help="of blocks with and without saves, at most")
    options.add_argument("--rounds", type=int, default=3, help="saves and loads beside dcp, at most")
    options.add_argument("--policy", default="overlap")
    options.add_argument("--seconds", type=float, default=170.0, help="for all of it")
    options.add_argument("--to", type=Path, default=RESULTS, help="folder of the report")
    options.add_argument("--name", default="", help="of the report; ranks or ranks-cuda if nothing is said")
    options.add_argument("--scratch", help="folder to save in")
    options.add_argument("--way", help=argparse.SUPPRESS)
    options.add_argument("--system", help=argparse.SUPPRESS)
    options.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    options.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    cuda = arguments.device == "cuda"
    arguments.files_model = arguments.files_model or arguments.model or ("gpt-0.2b" if cuda else "gpt-25m")
    arguments.model = arguments.model or ("gpt-1.3b" if cuda else "gpt-25m")
    if arguments.way:
        rank_main(arguments)
        return
    end_on_signals()
    systems = arguments.systems.split(",")
    ways = arguments.ways.split(",") if arguments.ways else list(WAYS if cuda else WAYS[-1:])
    began = time.monotonic()
    with scratch(arguments.scratch) as folder:
        report = Report(
            arguments.name or ("ranks-cuda" if cuda else "ranks"),
            f"{arguments.ranks} ranks of {arguments.model} on {arguments.device}: {', '.join(ways)}",
            folder,
            columns=("way", "what", "measured"),
            module="ranks",
        )
        if FILES in ways:
            report.notes += [
                "Times are of the slowest rank: the median, and from the fastest to the slowest. Each takes its turn, "
                "another is the first each time, and a first save of each is not counted. Saves count until they are "
                "on disk and fsynced, whoever makes them. Loads begin with nothing in the page cache and no agent: "
                "zerostall's include its start, from compiled modules as an installed package has them.",
                "dcp is torch.distributed.checkpoint with its defaults, `get_state_dict` and `set_state_dict` "
                "included. With zerostall's Writer and Reader, dcp.save and dcp.load write and read zerostall's files.",
                f"What is saved and loaded beside dcp is {arguments.files_model} with FSDP2.",
            ]
        if systems != [OURS]:
            report.notes.append(
                "Systems of others save as `benchmarks/peers` calls them, in the same loop. Their blocks begin with "
                "nothing under way, and their files are finished and deleted outside of what is timed; but a save "
                "waits for the files of the one before in the same block, as their users must."
            )
        if cuda:
            report.notes += [
                "The floor is what reading the bytes that a GPU stores takes at 4.3 TB/s. A stall is the call and the "
                "larger of the thread's and the stream's wait before the update, of the slowest rank, less what the "
                "same marks tell in steps without a save.",
            ]
        turns = [(way, system) for way in ways for system in (systems if way in TRAINED else (OURS,))]
        for index, (way, system) in enumerate(turns):
            left = began + arguments.seconds - time.monotonic()
            deadline = time.monotonic() + left / (len(turns) - index)
            found = run_way(way, system, arguments, folder / f"{way}-{system}", deadline)
            if not found:
                report.notes.append(f"{way}, {system}: nothing was found in time")
            for one in found:
                report.rows += one.rows()
                report.goals |= one.goals() if cuda else {}
                report.samples |= one.samples
            report.write(arguments.to)  # whatever becomes of the rest
            shutil.rmtree(folder / f"{way}-{system}", ignore_errors=True)
        path = report.write(arguments.to)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
