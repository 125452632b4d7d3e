"""A save through another GPU's memory: the rate beside a bare copy, the guard, both GPUs' training, a death.

    python -m benchmarks.peer --out peer.json                     # two GPUs, about four minutes
    python -m benchmarks.peer --out peer.json --rates             # only how fast it is, half a minute
    python -m benchmarks.peer --out peer.json --model tiny        # to try it

One GPU trains and saves through the other, on which another process trains all the while. Blocks of steps alternate:
no saves, saves through the other GPU's memory, saves straight to host memory. At last a trainer is killed, and how long
it takes until another has its state again is told with and without the other GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import zerostall
from benchmarks.machine import ROOT, hardware, versions
from benchmarks.recovery import die_and_come_back
from benchmarks.stall.loop import SIZES, Loop
from benchmarks.workload import scratch

STRETCH = 64 << 20
READY_SECONDS = 120.0


def bare_rates(nbytes: int) -> dict[str, float]:
    """Bytes a second of `cuMemcpyPeerAsync` from GPU 0 to GPU 1: in one call, and in calls of 64 MiB."""
    cuda = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    contexts = []
    for ordinal in range(2):
        device, context = ctypes.c_int(), pointer()
        assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        contexts.append(context)
    copy = cuda.cuMemcpyPeerAsync
    copy.argtypes = [ctypes.c_uint64, pointer, ctypes.c_uint64, pointer, ctypes.c_size_t, pointer]
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")
    target[:16].copy_(source[:16])  # enables the access
    rates = {}
    for name, size in (("one call", nbytes), ("64 MiB", STRETCH)):
        stream = torch.cuda.Stream(0)
        seconds = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            for at in range(0, nbytes, size):
                left = min(size, nbytes - at)
                to, frm = target.data_ptr() + at, source.data_ptr() + at
                assert copy(to, contexts[1], frm, contexts[0], left, stream.cuda_stream) == 0
            end.record(stream)
            torch.cuda.synchronize(0)
            seconds.append(begin.elapsed_time(end) / 1e3)
        rates[name] = nbytes / statistics.median(seconds[1:])
    return rates


def victim(arguments: argparse.Namespace) -> None:
    """Another process's training on the second GPU, for ever: tells when each step ended and how long it took."""
    torch.cuda.set_device(1)
    loop = Loop(SIZES[arguments.model], "cuda:1", flips=False)
    loop.run(3)
    while True:
        start = time.monotonic()
        loop.step(None, lambda: None)
        torch.cuda.synchronize()
        end = time.monotonic()
        print(json.dumps([end, end - start]), flush=True)


class Victim:
    """That process, as the measuring one sees it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._log = folder / "victim"
        command = [sys.executable, "-m", "benchmarks.peer", "--victim", "--model", arguments.model, "--out", "-"]
        with self._log.open("w") as out:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=out)
        deadline = time.monotonic() + READY_SECONDS
        while not self._log.stat().st_size:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the process on the second GPU does not train")
            time.sleep(0.1)

    def between(self, start: float, end: float) -> list[float]:
        """Seconds of the steps that lay in there."""
        steps = [json.loads(line) for line in self._log.read_text().splitlines()[:-1]]
        return [took for ended, took in steps if ended - took >= start and ended <= end]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Saves:
    """A checkpointer of one kind, and what its blocks took."""

    def __init__(self, folder: Path, loop: Loop, *, peer: bool) -> None:
        self.loop = loop
        self.number = 0
        self.ckpt = zerostall.Checkpointer(
            folder, keep=1, disk_interval=3600.0, peer=peer, model=loop.model, optimizer=loop.optimizer
        )
        deadline = time.monotonic() + READY_SECONDS
        for _ in range(2):
            self.save().wait("host")
        while peer and self.ckpt.stats.stowed < 2:
            if time.monotonic() > deadline:
                raise SystemExit("nothing is captured into the other GPU's memory: see `zerostall doctor`")
            self.save().wait("host")

    def save(self) -> Any:
        self.number += 1
        return self.ckpt.save(self.number, when_busy="wait")

    def alone(self, count: int) -> dict[str, list[float]]:
        """Saves while nothing trains here: seconds until read, until sealed."""
        found: dict[str, list[float]] = {"read": [], "sealed": []}
        for _ in range(count):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.save().wait("host")
            found["sealed"].append(time.perf_counter() - start)
            found["read"].append(self.ckpt.stats.drain_seconds[-1])
        return found

    def block(self, steps: int, every: int) -> tuple[list[float], list[float], list[float], int]:
        """Steps with saves: seconds of each step; of the calls; that the device stood still before updates; skipped."""
        done, calls = [], []
        skipped = 0
        for k in range(steps):

            def save() -> bool:
                nonlocal skipped
                self.number += 1
                saving = self.ckpt.save(self.number)
                skipped += bool(saving.skipped)
                return not saving.skipped

            done.append(self.loop.step(save if k % every == 0 else None, lambda: None))
        settled = self.loop.settle(done)
        calls = [one.called - one.begin for one in settled if one.saved]
        waits = [one.device[2] - one.device[1] for one in settled if one.saved]
        return [one.end - one.begin for one in settled], calls, waits, skipped


def spread(samples: list[float]) -> dict[str, float]:
    """Median, mean and extremes."""
    if not samples:
        return {}
    return {
        "median": statistics.median(samples),
        "mean": statistics.fmean(samples),
        "min": min(samples),
        "max": max(samples),
        "count": len(samples),
    }


def training(arguments: argparse.Namespace, folder: Path, loop: Loop) -> dict[str, Any]:
    """Both GPUs train; blocks alternate."""
    neighbour = Victim(arguments, folder)
    kinds = {}
    try:
        kinds = {
            "peer": Saves(folder / "peer", loop, peer=True),
            "host": Saves(folder / "host", loop, peer=False),
        }
        found: dict[str, dict[str, list[float]]] = {
            kind: {"step": [], "call": [], "wait": [], "victim": [], "skipped": []} for kind in ("none", *kinds)
        }
        for _ in range(arguments.rounds):
            for kind in found:
                torch.cuda.synchronize()
                start = time.monotonic()
                if kind == "none":
                    bare = loop.settle([loop.step(None, lambda: None) for _ in range(arguments.steps)])
                    found[kind]["step"] += [one.end - one.begin for one in bare]
                else:
                    steps, calls, waits, skipped = kinds[kind].block(arguments.steps, arguments.every)
                    found[kind]["step"] += steps
                    found[kind]["call"] += calls
                    found[kind]["wait"] += waits
                    found[kind]["skipped"].append(skipped)
                torch.cuda.synchronize()
                found[kind]["victim"] += neighbour.between(start, time.monotonic())
                time.sleep(0.5)  # what is on its way gets there
        result: dict[str, Any] = {
            kind: {name: spread(samples) for name, samples in facts.items()} for kind, facts in found.items()
        }
        for kind in kinds:
            saves = max(1, len(found[kind]["call"]))
            more = sum(found[kind]["step"]) - statistics.fmean(found["none"]["step"]) * len(found[kind]["step"])
            result[kind]["added_a_save"] = more / saves
            for who in ("step", "victim"):
                plain, with_saves = (statistics.fmean(found[one][who]) for one in ("none", kind))
                result[kind][f"{who}_slower_percent"] = 100 * (with_saves / plain - 1)
        return result
    finally:
        for saves in kinds.values():
            saves.ckpt.close()
        neighbour.close()


def exact(saves: Saves) -> bool:
    """Does a save with a step right behind it come back bit for bit?"""
    loop = saves.loop

    def state() -> list[torch.Tensor]:
        found = [parameter.detach() for parameter in loop.model.parameters()]
        for held in loop.optimizer.state.values():
            found += [value for value in held.values() if isinstance(value, torch.Tensor)]
        return found

    expected = [tensor.clone() for tensor in state()]
    saving = saves.save()
    loop.step(None, lambda: None)
    saving.wait("host")
    saves.ckpt.restore(saves.number)
    return all(torch.equal(one, other) for one, other in zip(state(), expected, strict=True))


def restored(saves: Saves, nbytes: int) -> dict[str, object]:
    """How fast the newest image comes back, and from where."""
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        saves.ckpt.restore(saves.number)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    best = min(seconds)
    return {"seconds": seconds, "bytes_per_second": nbytes / best, "tier": saves.ckpt.stats.restored_from}


def main() -> None:
    options = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    options.add_argument("--out", required=True)
    options.add_argument("--model", default="gpt-0.7b")
    options.add_argument("--target", type=float, default=0.2, help="seconds of a step")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=12, help="steps of a block")
    options.add_argument("--every", type=int, default=3, help="steps from one save to the next")
    options.add_argument("--rates", action="store_true", help="only the bare copy and saves while nothing trains")
    options.add_argument("--no-deaths", action="store_true")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    options.add_argument("--victim", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.victim:
        victim(arguments)
        return
    if torch.cuda.device_count() < 2:
        raise SystemExit("two GPUs are needed")
    out = Path(arguments.out).absolute()
    result: dict[str, Any] = {
        "command": " ".join(["python", "-m", "benchmarks.peer", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())],
        "cores": os.cpu_count(),
    }

    def tell(name: str, value: Any) -> None:
        result[name] = value
        out.write_text(json.dumps(result, indent=1))
        print(name, json.dumps(value, indent=1), flush=True)

    loop = Loop(SIZES[arguments.model], "cuda:0", flips=False)
    loop.run(3)
    loop.aim(0.0 if arguments.rates else arguments.target)
    nbytes = sum(p.nbytes for p in loop.model.parameters()) + sum(
        value.nbytes for held in loop.optimizer.state.values() for value in held.values()
    )
    tell("state_bytes", nbytes)
    bare = bare_rates(nbytes)
    torch.cuda.empty_cache()
    tell("bare_peer_copy", bare)
    with scratch(arguments.folder) as folder:
        for kind in ("peer", "host"):
            saves = Saves(folder / f"alone-{kind}", loop, peer=kind == "peer")
            found = saves.alone(8)
            rate = nbytes / statistics.median(found["read"])
            facts = {"read": spread(found["read"]), "sealed": spread(found["sealed"]), "bytes_per_second": rate}
            facts |= {"percent_of_bare": 100 * rate / bare["one call"]} if kind == "peer" else {}
            facts["bit_exact"] = exact(saves)
            facts["restored"] = restored(saves, nbytes)
            saves.ckpt.close()
            tell(f"alone_{kind}", facts)
        if not arguments.rates:
            tell("training", training(arguments, folder, loop))
    del loop, saves
    torch.cuda.empty_cache()
    if not (arguments.no_deaths or arguments.rates):
        for kind in ("peer", "host"):
            with scratch(arguments.folder) as folder:
                facts = SimpleNamespace(model=arguments.model, device="cuda", slots=3, steps=6, peer=kind == "peer")
                facts.ranks, facts.kill, facts.then, facts.tier = 1, "all", "", "host"
                death, *_ = die_and_come_back(facts, folder)  # pyright: ignore[reportArgumentType]
                tell(f"death_{kind}", {"seconds_since_the_kill": death.at, "exact": death.exact, "tier": death.tier,
                                       "steps_lost": death.lost, "log": death.registered})  # fmt: skip


if __name__ == "__main__":
    main()
