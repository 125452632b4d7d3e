"""How the time of `save()` and of the guard on the training thread is divided, by clocks put around their parts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from zerostall import native
from zerostall.trainer.captures import Captures
from zerostall.trainer.guard import Guard
from zerostall.trainer.ledger import Ledger
from zerostall.trainer.memory import Shelf
from zerostall.trainer.pace import Pace
from zerostall.trainer.saves import Saves
from zerostall.trainer.sealer import Sealer
from zerostall.trainer.state import State, Values
from zerostall.trainer.tears import Tears

# Those in one row are timed together: a clock within another's part costs that a microsecond.
PARTS: tuple[dict[str, tuple[type, str]], ...] = (
    {"the call": (Saves, "save"), "the guard, where all has been read": (Guard, "_pass")},
    {
        "call: image taken": (Captures, "take"),
        "call: copy let begin": (native.Capture, "start"),
        "call: handed to the sealer": (Sealer, "seal"),
        "guard: looking for tears": (Tears, "look"),
        "guard: all, where something is to be read": (Guard, "_let_go"),
    },
    {
        "call: named": (Pace, "next"),
        "call: slot": (Shelf, "take"),
        "call: what devices' generators hold": (Values, "again"),
        "call: objects compared (not at rest)": (State, "fits"),
        "call: small values (not at rest)": (State, "values"),
        "call: accepted": (Ledger, "accept"),
        "guard: versions": (native.Tensors, "moved"),
        "guard: chunks (not all read)": (native.Capture, "protect"),
    },
    {"call: at rest, tensors, capture": (native.CaptureOrder, "begin_at_rest")},
)
_REST, _TENSORS = "call: at rest?", "call: tensors read"


@contextlib.contextmanager
def clocks(row: int) -> Iterator[dict[str, list[float]]]:
    """Times of each part of every call and guard within, in seconds.

    With the row behind the last, what `begin_at_rest` does first is done before it once more, each part for itself;
    the snapshot before must have been captured by then.
    """
    samples: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        times = samples.setdefault(name, [])

        def clocked(*values: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*values, **options)
            finally:
                times.append(time.perf_counter() - start)

        return clocked

    with contextlib.ExitStack() as undo:
        for name, (owner, attribute) in (PARTS[row] if row < len(PARTS) else {}).items():
            before = owner.__dict__[attribute]
            setattr(owner, attribute, timed(name, getattr(owner, attribute)))
            undo.callback(setattr, owner, attribute, before)
        if row == len(PARTS):
            take = Captures.take_at_rest
            undo.callback(setattr, Captures, "take_at_rest", take)

            def in_parts(self: Captures) -> Any:
                if (rest := self._rest) is not None:
                    timed(_REST, rest.still.same)()
                    timed(_TENSORS, self._sources.refresh)()  # type: ignore[union-attr]
                return take(self)

            Captures.take_at_rest = in_parts  # type: ignore[method-assign]
        yield samples
