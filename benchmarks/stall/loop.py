"""The training loop that is measured: a GPT with fp32 AdamW and bf16 autocast, every step with marks in it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch.utils.hooks import RemovableHandle

from benchmarks.machine import ROOT

# Examples are scripts, not a package.
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from model import GPT, Shape

Mark = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """A model to train.

    Attributes:
        most: samples in one pass; a larger batch is made of several, since activations take memory.
        context: tokens of a sample.
    """

    width: int
    layers: int
    most: int
    context: int = 1024


SIZES = {
    "gpt-0.7b": Size(1536, 25, most=64),  # 8.5 GB of state in 1 016 tensors
    "gpt-0.7b-wide": Size(7680, 1, most=64),  # 8.5 GB in 56
    "gpt-3b": Size(4096, 15, most=6),  # 36.3 GB in 616
    "tiny": Size(128, 2, most=8, context=16),
}


@dataclass
class Step:
    """One step, by the clock of the training thread and by that of the device's stream; both in seconds.

    Attributes:
        saved: whether a save was made and accepted.
        begin, called, ready, guarded, updated, end: on the thread: before `save`, after it, after backward, after all
            waits before the update, after the update was launched, after the loss was looked at (if it was).
        device: begin, ready, guarded, updated, as the device came by.
        drained: from the save until its bytes had left the device, where the system says so.
    """

    saved: bool
    begin: float
    called: float
    ready: float
    guarded: float
    updated: float
    end: float
    device: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    drained: float = 0.0


class Clock:
    """Marks in the stream of the device; on the CPU, where everything is done in order, the time of the thread."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self._zero = self.mark()
        self.synchronize()
        self._zero_cpu = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero_cpu

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def mark(self) -> object:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: list[object]) -> tuple[float, ...]:
        """When the device came by, on the same scale as `now`."""
        if not self.gpu:
            return tuple(cast("float", mark) - self._zero_cpu for mark in marks)
        zero, first, *others = cast("list[torch.cuda.Event]", [self._zero, *marks])
        begin = zero.elapsed_time(first) / 1e3
        # Events tell milliseconds in 24 bits: from the first one only, or the microseconds are lost.
        return begin, *(begin + first.elapsed_time(other) / 1e3 for other in others)


class Loop:
    """A model in training.

    Attributes:
        looks: the loop looks at the loss after each step, as most do, and so never runs ahead of the device by more.
    """

    def __init__(self, size: Size, device: str, *, flips: bool) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        shape = Shape(width=size.width, layers=size.layers, heads=size.width // 128, context=size.context, dropout=0.0)
        with self.device:
            self.model = GPT(shape)
            self.tokens = torch.randint(0, 256, (256, size.context + 1))
        if flips:
            import zerostall.optim

            kind = zerostall.optim.AdamW
        else:
            kind = torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-4, fused=True)
        self.size = size
        self.batch = min(4, size.most)
        self.batches: dict[float, int] = {}
        self.looks = True
        self.clock = Clock(self.device)
        self._last: RemovableHandle | None = None
        self._let_go: tuple[float, object] = (0.0, None)

    def gradients(self) -> torch.Tensor:
        passes = -(-self.batch // self.size.most)
        total = torch.zeros((), device=self.device)
        for tokens in self.tokens[: self.batch].chunk(passes):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.model.loss(tokens) / passes
            loss.backward()
            total += loss.detach()
        return total

    def step(self, save: Callable[[], bool] | None, wait: Callable[[], None]) -> tuple[Step, list[object]]:
        """One step; `save` comes first, if at all, `wait` before the update. Marks are read later, by `settle`."""
        now, mark = self.clock.now, self.clock.mark
        marks = [mark()]
        begin = now()
        saved = save is not None and save()
        called = now()
        total = self.gradients()
        marks.append(mark())
        ready = now()
        wait()
        self._come_last()
        self.optimizer.step()
        updated = now()
        guarded, passed = self._let_go
        marks += [passed, mark()]
        self.optimizer.zero_grad()
        if self.looks:
            total.item()
        return Step(saved, begin, called, ready, guarded, updated, now()), marks

    def _come_last(self) -> None:
        """Have the moment noted when all hooks before the update are through.

        Only where somebody has hooked the optimizer since: a hook that comes and goes with each step is a change of
        what is saved, at which a save would have to look each time.
        """
        hooks: dict[int, object] = self.optimizer._optimizer_step_pre_hooks  # type: ignore[assignment]
        if self._last is not None and next(reversed(hooks)) == self._last.id:
            return
        if self._last is not None:
            self._last.remove()

        def note(*_: object) -> None:
            self._let_go = (self.clock.now(), self.clock.mark())

        self._last = self.optimizer.register_step_pre_hook(note)

    def settle(self, steps: list[tuple[Step, list[object]]]) -> list[Step]:
        """The steps with the times of their marks; the device has come by all of them."""
        self.clock.synchronize()
        for step, marks in steps:
            step.device = self.clock.seconds(marks)
        return [step for step, _ in steps]

    def run(self, steps: int) -> float:
        """Seconds a step of so many bare ones."""
        self.clock.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(None, lambda: None)
        self.clock.synchronize()
        return (time.perf_counter() - start) / steps

    def aim(self, target: float) -> None:
        """Choose the batch so that a step takes about `target` seconds; 0 leaves it as it is."""
        if target and target not in self.batches:
            times = []
            for self.batch in (8, 4):
                self.run(10 if self.batch == 8 else 2)  # a device that was idle computes faster at first
                times.append(self.run(4))
            each = (times[0] - times[1]) / 4
            wanted = 8 + (target - times[0]) / max(each, 1e-6)
            self.batches[target] = max(1, min(len(self.tokens), round(wanted)))
        self.batch = self.batches.get(target, self.batch)

    def keep_device_busy(self) -> None:
        """Queue about 50 ms of work, so that what is launched next is done late."""
        if self.clock.gpu:
            torch.cuda._sleep(100_000_000)
