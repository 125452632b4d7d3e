"""Ctrl-C at a chosen place between two calls.

found = Interrupt(SAVE, 7).run(lambda: ckpt.save(1))    # False: there are fewer places
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Container
from types import CodeType, FrameType

_LOOKS = ("RESUME", "CALL", "JUMP_BACKWARD")  # after these CPython sees to signals
SAVE = {f"{name}.py" for name in ("captures", "checkpointer", "guard", "ledger", "memory", "saves", "sealer", "tears")}


class Interrupt:
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
            if not self.where:
                raise
        finally:
            sys.settrace(before)
        return bool(self.where)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        name = frame.f_code.co_filename.rpartition("/")[2]
        within = name == "threading.py" and frame.f_back is not None and frame.f_back.f_trace is not None
        if not within and name not in self._files:
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
