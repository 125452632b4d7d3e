"""Width: what saves cost, how they drain, and how a job comes back, on all GPUs of a host. One command.

    python -m benchmarks.width --device cuda --ranks 8                   # 3 B; all sections, as long as each may take
    python -m benchmarks.width --device cuda --ranks 2 --model gpt-1.3b --only stalls --limit 170 --to out
    python -m benchmarks.width --device cpu --ranks 2 --model tiny       # to try it, with gloo

    stalls    DDP, FSDP2, FSDP2 x TP: a save at every step and at every fifth      (benchmarks.ranks)
    others    the same loops with torch_checkpointing and DCP at its best setting  (benchmarks.ranks)
    peer      through other GPUs' memory, in a ring and in pairs, and collectives  (benchmarks.ranks)
    deaths    kill -9 of one trainer, and of all                                   (benchmarks.recovery)
    reshard   N -> N/2 -> N, from host memory and from disk                        (benchmarks.recovery)

Each section has a time limit of its own and reports of its own, `width-DEVICE-RANKS-PART`; after each the page of all,
`width-DEVICE-RANKS`, is written anew from whatever reports there are by then, of earlier calls, too. So a run that is
ended loses nothing, and sections may be run one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import ROOT, end_on_signals
from benchmarks.report import RESULTS, Report

LIMITS = {"stalls": 400.0, "others": 400.0, "peer": 150.0, "deaths": 150.0, "reshard": 300.0}  # seconds
SIZES = {"cuda": "gpt-3b", "cpu": "tiny"}
ENDING = 30.0  # seconds in which what was ended by a signal cleans up
LAST = 30.0  # seconds of a section's time that benchmarks.ranks leaves for deleting files


class Part:
    """One report of a section: what is run for it.

    Args:
        share: of the section's time.
    """

    def __init__(self, name: str, share: float, words: Callable[[argparse.Namespace, float], list[object]]) -> None:
        self.name = name
        self.share = share
        self.words = words


def of_ranks(ways: str, *more: object) -> Callable[[argparse.Namespace, float], list[object]]:
    """Words for benchmarks.ranks."""

    def words(options: argparse.Namespace, limit: float) -> list[object]:
        shapes = ways.replace("pairs,", "") if options.ranks == 2 else ways  # two GPUs are a ring and a pair
        given = ["benchmarks.ranks", "--ways", options.ways or shapes, "--batch", options.batch]
        return [*given, "--pairs", options.pairs, "--seconds", max(limit / 2, limit - LAST), *more]

    return words


def of_recovery(*more: object, then: bool = False) -> Callable[[argparse.Namespace, float], list[object]]:
    """Words for benchmarks.recovery."""

    def words(options: argparse.Namespace, limit: float) -> list[object]:
        worlds = ("--then", f"{max(1, options.ranks // 2)},{options.ranks}") if then else ()
        return ["benchmarks.recovery", "--steps", 4, *worlds, *more]

    return words


WAYS = "ddp,fsdp2,2d"
SECTIONS: dict[str, tuple[Part, ...]] = {
    "stalls": (Part("stalls", 1.0, of_ranks(WAYS, "--every", "1,5")),),
    "others": (
        Part("others", 1.0, of_ranks(WAYS, "--every", "5,1", "--systems", "torch_checkpointing,dcp-stager")),
    ),
    "peer": (Part("peer", 1.0, of_ranks("ring,pairs,straight")),),
    "deaths": (
        Part("death-of-one", 0.5, of_recovery("--kill", "one")),
        Part("death-of-all", 0.5, of_recovery("--kill", "all")),
    ),
    "reshard": (
        Part("reshard-host", 0.4, of_recovery("--tier", "host", then=True)),
        Part("reshard-disk", 0.6, of_recovery("--tier", "disk", then=True)),
    ),
}  # fmt: skip


def run(part: Part, options: argparse.Namespace, limit: float) -> str:
    """Why it has ended, "" if all was measured."""
    name, begin = f"{options.name}-{part.name}", time.monotonic()
    words = [*part.words(options, limit), "--device", options.device, "--model", options.model]
    words += ["--ranks", options.ranks, "--name", name]
    where = "--scratch" if words[0] == "benchmarks.ranks" else "--folder"
    words += [where, options.folder] if options.folder else []
    words += ["--to" if words[0] == "benchmarks.ranks" else "--results", options.to]
    command = [sys.executable, "-W", "ignore", "-m", *map(str, words)]
    print("==", part.name, f"({limit:.0f} s):", shlex.join(command[3:]), flush=True)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"was ended after {time.monotonic() - begin:.0f} s"
    finally:
        end(process)
    return f"ended with {code}" if code else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End it and those it has started: by asking first, so that nothing of it stays."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def page(options: argparse.Namespace, ended: dict[str, str]) -> Path:
    """One page of all the reports that there are."""
    report = Report(
        options.name,
        f"{options.ranks} ranks of {options.model} on {options.device}: stalls, links, deaths, other worlds",
        Path(options.folder or tempfile.gettempdir()),
        columns=("part", "of", "what", "measured"),
        module="width",
    )
    for part in (part for parts in SECTIONS.values() for part in parts):
        try:
            facts = json.loads((options.to / f"{options.name}-{part.name}.json").read_text())
        except FileNotFoundError:
            report.notes.append(f"{part.name}: {ended.get(part.name) or 'not run'}")
            continue
        _, *others = facts["columns"]
        for first, *rest in facts["rows"]:
            if others != ["what", "measured"]:  # one of its columns after another
                rest = ["; ".join(others), "; ".join(rest)]
            report.rows.append((part.name, first, *rest))
        report.goals |= {f"{part.name}: {goal}": reached for goal, reached in facts["goals"].items()}
        report.samples |= {f"{part.name}: {name}": samples for name, samples in facts["samples"].items()}
        report.notes.append(f"{part.name}: `{facts['command']}`, {facts['date']} {ended.get(part.name, '')}".rstrip())
        report.notes += [f"{part.name}: {note}" for note in facts["notes"]]
    return report.write(options.to)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--model", default="", help="a size of benchmarks/ranks/loop.py; gpt-3b, tiny on the CPU")
    parser.add_argument("--only", default="", help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--page", action="store_true", help="only write the page of the reports that there are")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds a section, rather than what each has")
    parser.add_argument("--ways", default="", help="in one section, rather than all: ddp, fsdp2, 2d; ring, pairs, …")
    parser.add_argument("--batch", type=int, default=0, help="samples a rank and step; as the drain fits, if 0")
    parser.add_argument("--pairs", type=int, default=6, help="of blocks with and without saves, at most")
    parser.add_argument("--folder", help="where to save (default: the temporary folder)")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the reports")
    parser.add_argument("--name", default="", help="of the reports (default: width-DEVICE-RANKS)")
    options = parser.parse_args()
    end_on_signals()
    options.model = options.model or SIZES[options.device]
    options.name = options.name or f"width-{options.device}-{options.ranks}"
    options.to = options.to.absolute()
    ended: dict[str, str] = {}
    sections = () if options.page else options.only.split(",") if options.only else SECTIONS
    for name in sections:
        for part in SECTIONS[name]:
            ended[part.name] = run(part, options, part.share * (options.limit or LIMITS[name]))
            page(options, ended)
    print(page(options, ended).with_suffix(".md").read_text())
    return int(any(ended.values()))


if __name__ == "__main__":
    sys.exit(main())
