"""What a save costs training on a GPU, beside other ways to save.

    python -m benchmarks.stall run --out RAW.json --minutes 8       # measures what fits, and says what did not
    python -m benchmarks.stall plan --minutes 8                     # what would be measured, in which order
    python -m benchmarks.stall report RAW.json                      # table, plots, timeline
    python -m benchmarks.stall run --device cpu --models tiny ...   # the same without a GPU, to try it

Blocks of steps with and without saves take turns in one process, and a block is compared with the ones right before
and after it. A step is: save (or not), forward and backward, the wait for what the last save still reads, update. Kept
apart are

    call       what the save took on the training thread
    guard      what that thread waited for before the update
    inserted   what that wait put into the device's stream, by events around it
    stall      call, and the larger of the other two: the time for which the thread or its stream stands still
    added      loop time with saves less without, a save: the stall, and slower compute while bytes move

Each system of others runs in a process of its own. RAW.json is written anew whenever a system has found out something.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.machine import ROOT, file_system, hardware, versions
from benchmarks.stall.cases import Case, Subject, from_json, to_json
from benchmarks.stall.plan import Plan, chosen, plan
from benchmarks.workload import scratch

GRACE = 20.0  # seconds that a process gets beyond its deadline


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stall", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("run", "measure"), ("plan", "say what would be measured")):
        one = verbs.add_parser(verb, help=text)
        one.add_argument("--minutes", type=float, default=8.0)
        one.add_argument("--models", default="gpt-0.7b", help="of gpt-0.7b, gpt-0.7b-wide, gpt-3b, tiny")
        one.add_argument("--systems", default="all")
        one.add_argument("--device", default="cuda")
        one.add_argument("--folder", help="where systems write (default: the temporary folder)")
        one.add_argument("--out", type=Path, required=verb == "run")
    child = verbs.add_parser("one")  # a process of `run`
    child.add_argument("job", type=Path)
    page = verbs.add_parser("report", help="write table, plots and timeline")
    page.add_argument("raw", type=Path, nargs="+", help="later ones add to earlier ones")
    page.add_argument("--to", type=Path, help="folder and name of what is written, without ending (default: as RAW)")
    page.add_argument("--remark", action="append", default=[], help="a paragraph at the top, once or more often")
    arguments = parser.parse_args()
    if arguments.verb == "one":
        one_process(json.loads(arguments.job.read_text()))
    elif arguments.verb == "report":
        from benchmarks.stall.report import write

        for path in write(arguments.raw, arguments.to or arguments.raw[0].with_suffix(""), arguments.remark):
            print(path)
    else:
        cases = chosen(arguments.models.split(","), arguments.systems.split(","))
        made = plan(cases, 60 * arguments.minutes - 5)
        show(made)
        if arguments.verb == "run":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # what was found out is kept
            run(arguments, made)


def show(made: Plan) -> None:
    for process, cases in made.processes.items():
        print(f"{made.seconds[process]:5.0f} s  {' · '.join(process)}")
        for case in cases:
            print(f"         {case.label}: {case.pairs} × {case.saves} saves")
    for case in made.left_out:
        print(f"left out {case.label}")
    sys.stdout.flush()


def run(arguments: argparse.Namespace, made: Plan) -> None:
    """Every process in turn; the raw results grow."""
    end = time.monotonic() + 60 * arguments.minutes
    raw: dict[str, object] = {
        "command": " ".join(["python", "-m", "benchmarks.stall", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": device_name(arguments.device),
        "hardware": {**hardware(), "file system": file_system(Path(arguments.folder or "/tmp"))},
        "versions": {**versions(), "cuda": str(torch.version.cuda), "python": platform.python_version()},
        "planned seconds": round(sum(made.seconds.values())),
        "left out": [f"{case.label}: did not fit into {arguments.minutes:g} minutes" for case in made.left_out],
    }
    subjects: list[Subject] = []
    batches: dict[str, dict[str, int]] = {}
    part = arguments.out.with_suffix(".part.json")

    for process, cases in made.processes.items():
        model = process[0]
        allowed = end - time.monotonic()
        if arguments.device != "cpu":  # there the plan's seconds mean nothing
            allowed = min(allowed, 1.35 * made.seconds[process] + 10)
        if allowed < 15:
            left = raw["left out"]
            assert isinstance(left, list)
            left += [f"{case.label}: the systems before it took longer than planned" for case in cases]
            continue
        part.unlink(missing_ok=True)
        with scratch(arguments.folder) as folder:
            job = {
                "model": model,
                "device": arguments.device,
                "flips": process[1] == "flipping",
                "cases": [vars(case) for case in cases],
                "folder": str(folder),
                "seconds": allowed,
                "part": str(part),
                "batches": batches.get(model, {}),
            }
            ended = None
            try:
                failure = run_child(job, allowed + GRACE)
            except BaseException as error:  # noqa: BLE001 - what was found out until then is kept
                failure, ended = str(error) or type(error).__name__, error
            # Before the folder goes, which takes a while.
            found: list[Subject] = []
            if part.exists():
                facts = json.loads(part.read_text())
                found = [from_json(one) for one in facts["subjects"]]
                batches[model] = facts["batches"]
            for peer in dict.fromkeys(case.peer for case in cases):
                subject = next((one for one in found if one.peer == peer), None)
                if subject is None:
                    found.append(Subject(peer, model, failure=failure or "no result"))
                elif failure and subject.correct == "not looked at" and peer != "none":
                    subject.failure = failure
            subjects += found
            raw["subjects"] = [to_json(subject) for subject in subjects]
            arguments.out.write_text(json.dumps(raw, separators=(",", ":")))
        if ended is not None:
            raise ended
    part.unlink(missing_ok=True)
    print(f"{arguments.out}: {len(subjects)} systems", flush=True)


def run_child(job: dict[str, object], seconds: float) -> str:
    """Runs one process; why it failed, or ""."""
    target = Path(str(job["folder"])) / "job.json"
    target.write_text(json.dumps(job))
    log = Path(str(job["folder"])) / "log"
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as stream:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stall", "one", str(target)],
            cwd=ROOT,
            env=environment,
            stderr=stream,
            start_new_session=True,
        )
        try:
            code = child.wait(seconds)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # with what the system under test has started
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"took longer than {seconds:.0f} s"
    said = log.read_text(errors="replace").strip().splitlines()
    print("\n".join(said[-(25 if code else 6) :]), file=sys.stderr, flush=True)
    if code == 0:
        return ""
    reason = next((line for line in reversed(said) if "Error" in line or "error" in line), said[-1] if said else "")
    return f"exit code {code}: {reason.strip()[:300]}"


def one_process(job: dict) -> None:
    from benchmarks.stall.loop import SIZES, Loop
    from benchmarks.stall.measuring import Bench

    deadline = time.monotonic() + job["seconds"] - 8  # to start, and to look closer
    cases = [Case(**case) for case in job["cases"]]
    loop = Loop(SIZES[job["model"]], job["device"], flips=job["flips"])
    loop.batches = {float(target): batch for target, batch in job["batches"].items()}
    found: dict[str, Subject] = {}
    shown = 0

    def done(subject: Subject) -> None:
        nonlocal shown
        found[subject.peer] = subject
        facts = {"subjects": [to_json(one) for one in found.values()], "batches": loop.batches}
        Path(job["part"]).write_text(json.dumps(facts))
        outcomes = sum(len(one.outcomes) for one in found.values())
        if subject.outcomes and outcomes > shown:
            shown = outcomes
            last = subject.outcomes[-1]
            added = sum(last.added) / len(last.added) if last.added else float("nan")
            print(f"{last.case.label}: {last.saves} saves, added {1e3 * added:.2f} ms", last.stopped, flush=True)

    bench = Bench(loop, Path(job["folder"]), deadline, done)
    for peer in dict.fromkeys(case.peer for case in cases):
        try:
            bench.measure([case for case in cases if case.peer == peer])
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            traceback.print_exc()
            subject = found.setdefault(peer, Subject(peer, job["model"]))
            subject.failure = f"{type(error).__name__}: {error}"[:300]
            done(subject)


def device_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.splitlines()
    return " + ".join(f"{found.count(line)} × {line}" for line in dict.fromkeys(found))


if __name__ == "__main__":
    main()
