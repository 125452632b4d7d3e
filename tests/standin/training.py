"""A training process whose state lies on a stand-in device, driven line by line; and the driver.

trainer = Trainer(where, environment)      # a process with a real Checkpointer
trainer.ask("fill", 3)                     # a kernel: all its state is 3 now
trainer.ask("save", 1)
trainer.kill()
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import select
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
from interrupt import SAVE, Interrupt

ROOT = Path(__file__).parents[2]
SIZES = (5_000_000, 3, 70_001, 1, 4096, 2_500_000, 12)  # of float32; 30 MB in two chunks
HOST = 1000
IMAGE = 4 * sum(SIZES)
ANSWER_SECONDS = 60.0


class Trainer:
    """The process, as a test sees it."""

    def __init__(self, where: Path, environment: dict[str, str], **options: object) -> None:
        self._folder = tempfile.TemporaryDirectory()
        asks, answers = Path(self._folder.name, "asks"), Path(self._folder.name, "answers")
        self._errors = Path(self._folder.name, "errors")
        os.mkfifo(asks)
        os.mkfifo(answers)
        words = ("-m", "standin.training", where, json.dumps(options))
        self.process = forked.start(*words, environment=environment, source=asks, output=answers, errors=self._errors)
        self._asks, self._answers = asks.open("wb"), answers.open("rb")
        self.ask("ready")

    def ask(self, *words: object) -> Any:
        """Do one thing there; its answer."""
        self._asks.write(json.dumps(words).encode() + b"\n")
        self._asks.flush()
        assert select.select([self._answers], [], [], ANSWER_SECONDS)[0], f"no answer to {words}"
        line = self._answers.readline()
        assert line, f"it ended while it was asked {words}: {self._errors.read_text()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["is"]

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self._asks, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._folder.cleanup()

    def close(self) -> None:
        self.ask("close")
        self.kill()


def save(trainer: Trainer, step: int) -> None:
    """A step filled with its number, sealed when this returns."""
    trainer.ask("fill", step)
    assert trainer.ask("save", step, {"when_busy": "wait"}) == ""
    assert trainer.ask("wait", step, "host") == ""


def expected(value: int) -> str:
    """The digest of a state that is all of that byte."""
    return hashlib.sha256(bytes([value]) * (4 * sum(SIZES) + HOST)).hexdigest()


# ------------------------------------------------------------------------------------------------ in the process


class State:
    """What `zerostall.trainer.state.State` is to a Checkpointer, of stand-in tensors and one array in host memory."""

    optimizers: tuple[object, ...] = ()
    has_owners = False

    at_once = ("t1", "t3", "host")
    reads = 0
    other: str | None = None
    """Another rank, that shares all tensors on devices: "alike", "odd"; None for none."""

    def __init__(self, roots: dict[str, Any], **_: object) -> None:
        from zerostall.core import layout
        from zerostall.core.layout import Shard

        self.holders = roots["holders"]
        shards = [Shard.whole(name, str(h.dtype), tuple(h.shape)) for name, h in self.holders.items()]
        self.layout = layout.build(shards)
        self.ordered = [self.holders[entry.name] for entry in self.layout.entries]
        self.proof = self._proof() if self.other else None

    def _proof(self) -> Any:
        from zerostall.core.partition import Shared
        from zerostall.trainer.state import proving

        proving._bits = lambda holder: holder  # pyright: ignore
        names = tuple(name for name in self.holders if name != "host")
        world = SimpleNamespace(gather=self._gather)
        return proving.Proof(world, [(Shared((0, 1), names), names)], self.holders, names)  # pyright: ignore

    def _gather(self, data: bytes, *, what: str) -> list[bytes]:
        """What two ranks say: the other has the same, or other bytes in t2."""
        import msgspec

        said = msgspec.msgpack.decode(data)
        if self.other == "odd" and isinstance(said, dict):
            said["t2"] ^= 1
        elif self.other == "odd":
            said = [(key, b"other") for key, _ in said]
        return [data, msgspec.msgpack.encode(said)]

    def survey(self) -> Any:
        names = [entry.name for entry in self.layout.entries]
        at_once = [k for k, name in enumerate(names) if name in self.at_once]
        tracked = [name != "host" for name in names]
        return SimpleNamespace(
            layout=self.layout, tensors=self.ordered, at_once=at_once, tracked=tracked, proof=self.proof
        )

    def fits(self, survey: object) -> bool:
        return True

    def values(self, survey: object) -> Any:
        from zerostall.core import values

        return SimpleNamespace(encode=lambda: values.encode({"stand": "in"}, "values"), let_go=lambda: None)

    def rest(self, survey: object, values: object) -> None:
        return None

    def targets(self, stored: Any, *_: object, **__: object) -> Any:
        assert stored.layout.digest == self.layout.digest
        return SimpleNamespace(
            entries=list(range(len(self.ordered))), tensors=self.ordered, views=[], reads_image=False
        )

    def begin(self) -> None:
        return None

    def about_to_write(self, to: object) -> None:
        return None

    def accept(self, targets: object, image: object) -> str:
        return "all of it"


def serve(where: str, options: dict[str, Any]) -> Iterator[Any]:
    """Do what the test says, line by line; yields the answers."""
    import numpy as np
    import torch

    from standin.cuda import FakeCuda, StandIn
    from zerostall import telemetry
    from zerostall.core.vaults import Peer
    from zerostall.trainer import checkpointer as module

    fake = FakeCuda(Path(os.environ["ZEROSTALL_LIBCUDA"]))
    stream = fake.stream()
    torch.cuda.current_stream = lambda _=None: SimpleNamespace(
        cuda_stream=stream, synchronize=lambda: fake.settle(stream)
    )  # pyright: ignore
    torch.cuda.mem_get_info = lambda _=None: (1 << 30, 1 << 30)  # pyright: ignore
    module.State = State  # pyright: ignore
    State.at_once = tuple(options.pop("at_once", State.at_once))
    State.other = options.pop("other", None)
    places = itertools.cycle(options.pop("places", [0]))
    if copies := options.pop("copies", 0):
        options["peer"] = Peer(copies)
    tensors = {f"t{k}": StandIn(fake, size, index=next(places)) for k, size in enumerate(SIZES)}
    array = np.zeros(HOST, np.uint8)
    ckpt = module.Checkpointer(where, rng=False, holders={**tensors, "host": array}, **options)
    savings: dict[int, Any] = {}

    def fill(value: int, microseconds: int = 0) -> None:
        fake.work(stream, microseconds, tensors["t0"], value)
        for tensor in tensors.values():
            fake.work(stream, 0, tensor, value)
        array[:] = value

    def digest() -> str:
        fake.settle(stream)
        found = hashlib.sha256()
        for tensor in tensors.values():
            found.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
        found.update(array.tobytes())
        return found.hexdigest()

    def save(step: int, **how: Any) -> str:
        savings[step] = ckpt.save(step, **{"when_busy": "wait", **how})  # the next slot may not have been granted yet
        return savings[step].skipped

    def wait(step: int, tier: str) -> str:
        try:
            savings[step].wait(tier, timeout=ANSWER_SECONDS)
        except Exception as error:  # the test looks at it
            return f"{type(error).__name__}: {error}"
        return ""

    def guard() -> None:
        with ckpt.guard():
            pass

    def interrupt(step: int, place: int) -> dict[str, Any]:
        """Save behind a long kernel, and have Ctrl-C come then: where, and whether a free slot was written to."""
        shelf, captures, over, freed = ckpt._shelf, ckpt._saves._captures, threading.Event(), []

        def images() -> list[bytes]:
            memory = shelf.memory
            assert memory is not None and memory.slot is not None
            return [ctypes.string_at(memory.address(memory.slot), memory.layout.nbytes)]

        for name in ("put_back", "take_back"):

            def freeing(*arguments: int, free: Any = getattr(shelf, name)) -> None:
                taken = shelf.memory is not None and shelf.memory.taken
                free(*arguments)
                if taken:
                    freed[:] = images()

            setattr(shelf, name, freeing)

        def end_the_kernel() -> None:
            deadline = time.monotonic() + 0.5  # whoever waits may not be seen
            while not over.is_set() and not (captures.begun and captures.begun.cancelled):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
            fake.release()

        fake.hold(stream)
        kernel = threading.Thread(target=end_the_kernel)
        kernel.start()
        interrupt = Interrupt(SAVE, place)
        found = interrupt.run(lambda: savings.__setitem__(step, ckpt.save(step, when_busy="wait")))
        del shelf.put_back, shelf.take_back
        over.set()
        kernel.join()
        guard()
        return {"found": found, "where": interrupt.where, "written": bool(freed) and freed != images()}

    for line in sys.stdin:
        word, *rest = json.loads(line)
        match word:
            case "ready" | "kill":
                yield None
            case "fill":
                yield fill(*rest)
            case "save":
                yield save(rest[0], **(rest[1] if len(rest) > 1 else {}))
            case "wait":
                yield wait(*rest)
            case "guard":
                yield guard()
            case "interrupt":
                yield interrupt(*rest)
            case "restore":
                yield ckpt.restore(*rest)
            case "digest":
                yield digest()
            case "stats":
                names = ("saves", "stowed", "skipped", "dirty", "chunks_compared", "restored_from")
                yield {name: getattr(ckpt.stats, name) for name in names}
            case "sums":
                yield ckpt._saves._captures._survey.proof._sums
            case "fallbacks":
                yield [found.text for found in telemetry.fallbacks()]
            case "has locker":
                yield ckpt._lockers._locker is not None
            case "spoil vault":
                locker, (_, memory) = ckpt._lockers._locker, ckpt._lockers._opened
                yield bool(ctypes.memset(memory.address, 0xEE, locker.places * locker.stride))
            case "fake":
                yield getattr(fake, rest[0])(*rest[1:])
            case "stream":
                yield stream
            case "close":
                yield ckpt.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    for answer in serve(sys.argv[1], json.loads(sys.argv[2])):
        answers.write(json.dumps({"is": answer}) + "\n")


if __name__ == "__main__":
    main()
