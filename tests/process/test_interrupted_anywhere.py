"""Ctrl-C between any two calls of a save: what comes after gets through."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Container
from pathlib import Path
from types import CodeType, FrameType

import pytest

import zerostall
from training import change, tensors
from zerostall.trainer import captures

pytestmark = pytest.mark.usefixtures("own_agent")

_LOOKS = ("RESUME", "CALL", "JUMP_BACKWARD")  # after these CPython sees to signals
_SAVE = {f"{name}.py" for name in ("captures", "checkpointer", "guard", "ledger", "memory", "saves", "sealer")}
_LIMIT = 5000


class _Interrupt:
    """KeyboardInterrupt at the n-th place, of some files, at which a signal's handler may run; and of `threading`."""

    def __init__(self, files: Container[str], place: int) -> None:
        self._files = files
        self._left = place
        self._codes: dict[CodeType, bytes] = {}
        self.where = ""

    def run(self, function: Callable[[], object]) -> bool:
        """Whether there are so many places."""
        before = sys.gettrace()
        try:
            sys.settrace(self._enter)
            function()
        except (KeyboardInterrupt, RuntimeError):  # the latter by `Condition.wait`, where it has just let go
            assert self.where
        finally:
            sys.settrace(before)
        return bool(self.where)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        name = frame.f_code.co_filename.rpartition("/")[2]
        caller = frame.f_back.f_code.co_filename.rpartition("/")[2] if frame.f_back is not None else ""
        if name == "threading.py":
            known = caller == name or caller in self._files
        else:
            known = name in self._files and frame.f_code.co_name != "_begin"
        if not known:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = self._codes.setdefault(frame.f_code, frame.f_code.co_code)
        last = ""

        def step(frame: FrameType, event: str, arg: object) -> Callable[..., object]:
            nonlocal last
            if event == "opcode":
                if last.startswith(_LOOKS):
                    self._left -= 1
                    if self._left == 0:
                        self.where = f"{name}:{frame.f_lineno}"
                        raise KeyboardInterrupt
                last = dis.opname[code[frame.f_lasti]]
            return step

        return step


@pytest.mark.parametrize("anew", [False, True])
def test_a_save_interrupted_anywhere_costs_no_later_one(
    where: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    """`anew`: the state is surveyed by the very save that is interrupted."""
    monkeypatch.setattr(captures, "_BUSY_SECONDS", 60.0)
    monkeypatch.setattr(captures, "_SAID_SECONDS", 5.0)
    state = tensors(1, 50)
    with zerostall.Checkpointer(where, state=state, when_busy="wait", rng=False) as ckpt:
        ckpt.restore()
        step, place, found = 1, 0, True
        ckpt.save(step)
        while found and place < _LIMIT:
            place += 1
            taking = ckpt._saves._captures
            taking._guard.settle()
            if anew:
                taking._survey = taking._rest = None
            interrupt = _Interrupt(_SAVE, place)
            found = interrupt.run(lambda step=step: ckpt.save(step + 1))
            assert _free(ckpt._condition), interrupt.where
            assert _free(taking._sealer._told), interrupt.where
            step += 2
            change(state["w"])
            ckpt.save(step)
        assert 30 < place < _LIMIT
        ckpt.save(step + 1).wait()
        kept = state["w"].clone()
        change(state["w"])
        assert ckpt.restore() == step + 1
        assert (state["w"] == kept).all()


def _free(condition: threading.Condition) -> bool:
    """Whether other threads can have it."""
    got: list[bool] = []

    def ask() -> None:
        if condition.acquire(timeout=60):
            got.append(True)
            condition.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return bool(got)
