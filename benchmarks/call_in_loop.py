"""What `save` and the guard take of the training thread within a loop, part by part.

Between two saves a step of training fills the caches with other things, and the copy of a snapshot goes through those
that all cores share: so nothing of what a call touches is in them, which `save_call` shows only in part.

    python -m benchmarks.call_in_loop --device cuda    gpt-0.7b, steps of about 0.3 s
    python -m benchmarks.call_in_loop                  1 000 tensors; memory is read until the caches hold nothing else
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

import torch

import zerostall
from benchmarks import stages
from benchmarks.report import Report, median, percentile, seconds
from benchmarks.save_call import Many
from benchmarks.stall.loop import SIZES, Loop
from benchmarks.workload import scratch

_EVICTING = 192 << 20  # bytes: more than the caches of a socket
_LEFT_OUT = 2  # saves that find the state not at rest yet


class Update:
    """An optimizer's step, and when it was let go on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._free = 0.0
        optimizer.register_step_pre_hook(self._note)  # behind the guard's

    def _note(self, *_: object) -> None:
        self._free = time.perf_counter()

    def step(self) -> float:
        """Seconds until it went on."""
        start = time.perf_counter()
        self._optimizer.step()
        return self._free - start


class OnDevice:
    """A GPT; the loop looks at the loss."""

    def __init__(self, model: str, target: float) -> None:
        self.loop = Loop(SIZES[model], "cuda", flips=False)
        self.loop.run(2)
        self.loop.aim(target)
        self.model, self.optimizer = self.loop.model, self.loop.optimizer

    def train(self) -> None:
        self.loop.gradients()

    def end(self) -> None:
        self.optimizer.zero_grad()
        torch.cuda.synchronize()


class OnProcessor:
    """As many tensors as a GPT has, and a look at other memory in place of a step."""

    def __init__(self, tensors: int) -> None:
        self.model = Many(tensors // 4, 16_384)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self._other = torch.ones(_EVICTING, dtype=torch.uint8)

    def train(self) -> None:
        self._other.view(torch.int64).sum()

    end = train


class Measuring:
    """One checkpointer throughout: to make one, and its first save, take longer than all that is measured."""

    def __init__(self, job: OnDevice | OnProcessor, ckpt: zerostall.Checkpointer) -> None:
        self._job = job
        self._ckpt = ckpt  # which has saved step 0
        self._update = Update(job.optimizer)
        self._step = 0

    def times(self, saves: int, deadline: float) -> tuple[list[float], list[float], list[float]]:
        """Seconds of calls, of updates until they went on, and of those with no snapshot to guard."""
        calls: list[float] = []
        guarded: list[float] = []
        bare: list[float] = []
        for number in range(-_LEFT_OUT, saves):
            if number > 0 and time.monotonic() > deadline:
                break
            self._step += 1
            start = time.perf_counter()
            saving = self._ckpt.save(self._step)
            calls.append(time.perf_counter() - start)
            while "host" not in saving.tiers:  # not by waiting, after which there is nothing to guard
                time.sleep(1e-3)
            for found in (guarded, bare):
                self._job.train()
                found.append(self._update.step())
                self._job.end()
        return calls[_LEFT_OUT:], guarded[_LEFT_OUT:], bare[_LEFT_OUT:]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--model", default="gpt-0.7b", choices=sorted(SIZES), help="on a device")
    options.add_argument("--step", type=float, default=0.3, help="seconds of a step, on a device")
    options.add_argument("--tensors", type=int, default=1_000, help="on the processor")
    options.add_argument("--saves", type=int, default=30, help="for each row of the table, at most")
    options.add_argument("--seconds", type=float, default=60.0, help="to be through by then, making the job included")
    options.add_argument("--results", help="folder of the report (default: benchmarks/results)")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    arguments = options.parse_args()
    began = time.monotonic()
    cuda = arguments.device == "cuda"
    job = OnDevice(arguments.model, arguments.step) if cuda else OnProcessor(arguments.tensors)
    page = Report(
        f"call_in_loop{'_cuda' if cuda else ''}",
        "What a save takes of the training thread within a loop, part by part",
        Path(arguments.folder or gettempdir()),
        columns=("part", "least", "p50", "p90", "max"),
        module="call_in_loop",
    )

    def row(name: str, times: list[float]) -> None:
        page.samples[f"{name} s"] = times
        figures: list[Callable[[list[float]], float]] = [min, median, lambda all: percentile(all, 0.9), max]
        page.rows.append((name, *(seconds(figure(times)) for figure in figures)))
        print(" | ".join(page.rows[-1]), flush=True)

    rows = range(-1, len(stages.PARTS) + 1)
    with (
        scratch(arguments.folder) as folder,
        zerostall.Checkpointer(
            folder / "saved",
            model=job.model,
            optimizer=job.optimizer,
            keep=1,
            slots=2,
            disk_interval=3600.0,
            when_busy="wait",
        ) as ckpt,
    ):
        measuring = Measuring(job, ckpt)
        start = time.monotonic()
        ckpt.save(0).wait("disk")  # no other goes there
        print(f"memory had, and a first save, in {time.monotonic() - start:.1f} s", flush=True)
        for number in rows:
            # Half of the time for the call as a whole.
            left = arguments.seconds - (time.monotonic() - began)
            deadline = time.monotonic() + left / (2 if number < 0 else len(rows) - number - 1)
            if number < 0:
                calls, guarded, bare = measuring.times(arguments.saves, deadline)
                row("save(step)", calls)
                row("update let go on, with a guard", guarded)
                row("update let go on, without", bare)
                stall = median(calls) + median(guarded) - median(bare)
                page.goals["stall (call and guard) < 0.2 ms"] = seconds(stall)
                continue
            with stages.clocks(number) as samples:
                measuring.times(arguments.saves, deadline)
            for name, times in samples.items():
                if len(times) > _LEFT_OUT:
                    row(name, times[_LEFT_OUT:])
    page.notes = [
        "each block of rows is measured on its own; a clock within a part adds a microsecond to it",
        "the last two rows are done before the image is taken, in steps in which it is then done once more",
        "the capture is done when the update comes, so that the guard has only to look for tears",
    ]
    print(page.write(Path(arguments.results)) if arguments.results else page.write())


if __name__ == "__main__":
    main()
