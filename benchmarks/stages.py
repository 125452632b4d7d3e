"""How the time of `save()` on the training thread is divided, by clocks put around its parts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from zerostall import native
from zerostall.trainer import captures
from zerostall.trainer.captures import Captures
from zerostall.trainer.ledger import Ledger
from zerostall.trainer.saves import Saves
from zerostall.trainer.sealer import Sealer
from zerostall.trainer.state import State
from zerostall.trainer.state.parts.rng import GeneratorStates

_PARTS: dict[str, tuple[type, str]] = {
    "all of it": (Saves, "save"),
    "objects are the same": (State, "fits"),
    "slot": (Captures, "_take_slot"),
    "tensors, values, capture": (Captures, "_begin"),
    "small values": (State, "values"),
    "of these, generators": (GeneratorStates, "read"),
    "accepted": (Ledger, "accept"),
    "handed to the sealer": (Sealer, "seal"),
}
_CAPTURE = "capture begun"
_TENSORS = "tensors read (and the rest of taking)"


class _Native:
    """The native module with a clock around the making of captures."""

    def __init__(self, timed: Callable[..., object]) -> None:
        self.Capture = timed

    def __getattr__(self, name: str) -> object:
        return getattr(native, name)


@contextlib.contextmanager
def clocks() -> Iterator[dict[str, list[float]]]:
    """Times of each part of every call within, in seconds; the clocks themselves take a microsecond each."""
    samples: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        times = samples.setdefault(name, [])

        def clocked(*values: object, **options: object) -> object:
            start = time.perf_counter()
            try:
                return call(*values, **options)
            finally:
                times.append(time.perf_counter() - start)

        return clocked

    with contextlib.ExitStack() as undo:
        for name, (owner, attribute) in _PARTS.items():
            before = owner.__dict__[attribute]
            clocked = timed(name, getattr(owner, attribute))
            setattr(owner, attribute, staticmethod(clocked) if isinstance(before, staticmethod) else clocked)
            undo.callback(setattr, owner, attribute, before)
        captures.native = _Native(timed(_CAPTURE, native.Capture))  # type: ignore[assignment]
        undo.callback(setattr, captures, "native", native)
        yield samples
    whole, values, begun = (samples[name] for name in ("tensors, values, capture", "small values", _CAPTURE))
    samples[_TENSORS] = [a - b - c for a, b, c in zip(whole, values, begun, strict=False)]
