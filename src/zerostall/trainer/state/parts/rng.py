"""Random generators: those of the process (python, numpy, torch, CUDA), and objects the user hands over."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from zerostall import native
from zerostall.errors import FormatError
from zerostall.trainer.state.refs import SmallTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy

_WORDS = 624
_TWISTER_BYTES = 4 * _WORDS + 4  # a Mersenne twister in memory: its words and its position


class _NumpyCache:
    """The state of numpy's global generator, read in full only when it has been used.

    Reading it in full takes 10 to 20 us and fills the caches, comparing its memory much less. The memory does not hold
    the normal number that a generator may have in stock, so an answer is kept only while there was none: making one
    moves the generator on.
    """

    def __init__(self) -> None:
        self._current: Callable[[], object] | None = None
        self._generator: object = None
        self._address = 0
        self._memory = b""
        self._state: object = None

    def state(self) -> object:
        if self._current is None:
            if "numpy" not in sys.modules:
                return None
            self._current = cast("Callable[[], object]", sys.modules["numpy"].random.get_bit_generator)
        generator = self._current()
        if generator is self._generator and native.same_memory(self._address, self._memory):
            return self._state
        return self._read(generator)

    def _read(self, generator: object) -> object:
        state = sys.modules["numpy"].random.get_state(legacy=False)
        self._generator = None
        if type(generator).__name__ == "MT19937" and not state["has_gauss"]:
            self._generator, self._state = generator, state
            self._address = cast("numpy.random.MT19937", generator).ctypes.state_address
            self._memory = ctypes.string_at(self._address, _TWISTER_BYTES)
        return state


class _PythonCache:
    """That of python's, likewise. Its normal number in stock is an attribute, which is watched."""

    _place = object.__basicsize__
    # The class below random.Random is the twister in C; it keeps nothing else between an object's head and its end.
    _fits = 0 <= random.Random.__mro__[1].__basicsize__ - object.__basicsize__ - _TWISTER_BYTES < 8

    def __init__(self) -> None:
        self._watch: native.Watch | None = None
        self._address = 0
        self._memory = b""
        self._state: tuple[object, ...] = ()

    def state(self) -> tuple[object, ...]:
        if self._watch is not None and self._watch.same() and native.same_memory(self._address, self._memory):
            return self._state
        return self._read()

    def _read(self) -> tuple[object, ...]:
        state = random.getstate()
        generator = cast("object", getattr(random.getstate, "__self__", None))
        self._watch = None
        if self._fits and type(generator) is random.Random and state[2] is None:
            self._state = state
            self._address = id(generator) + self._place
            self._memory = ctypes.string_at(self._address, _TWISTER_BYTES)
            # Whose method is called, and what it has in stock.
            self._watch = native.Watch([random.__dict__, generator.__dict__])
        return state


_numpy, _python = _NumpyCache(), _PythonCache()
_torch_state = torch.default_generator.get_state


def _cuda_states() -> list[torch.Tensor]:
    # Asked only once CUDA is up: its set-up is not for a save to start.
    return [one.get_state() for one in torch.cuda.default_generators] if torch.cuda.is_initialized() else []


@dataclass(slots=True)  # not frozen: that would take longer to make
class GeneratorStates:
    """The states of this process's generators at one moment.

    Attributes:
        python: of `random`.
        numpy: of numpy's global generator, None where numpy is not imported.
        torch: of torch's CPU generator.
        cuda: of each CUDA device's, empty where CUDA was not used.
    """

    python: tuple[object, ...]
    numpy: object
    torch: torch.Tensor
    cuda: list[torch.Tensor]

    @staticmethod
    def read() -> GeneratorStates:
        """Read them all."""
        return GeneratorStates(
            _python.state(),
            _numpy.state(),
            _torch_state(),
            _cuda_states(),
        )

    def tree(self) -> dict[str, object]:
        """Return them as a tree of values; may be called later than read()."""
        version, words, gauss = cast("tuple[int, tuple[int, ...], float | None]", self.python)
        return {
            "python": (version, struct.pack(f"<{len(words)}I", *words), gauss),
            "numpy": self.numpy,
            "torch": SmallTensor.of(self.torch),
            "cuda": [SmallTensor.of(state) for state in self.cuda],
        }


def restore_generators(tree: object) -> list[str]:
    """Put the process's generators back; return warnings."""
    if type(tree) is not dict:
        return []
    try:
        return _restore(cast("dict[str, object]", tree))
    except (KeyError, TypeError, ValueError, struct.error, RuntimeError, AttributeError) as error:
        raise FormatError(f"the states of random generators are damaged: {error}") from None


def _restore(tree: dict[str, object]) -> list[str]:
    warnings: list[str] = []
    version, packed, gauss = cast("tuple[int, bytes, float | None]", tree["python"])
    random.setstate((version, struct.unpack(f"<{len(packed) // 4}I", packed), gauss))
    if tree["numpy"] is not None:
        try:
            import numpy
        except ImportError:
            warnings.append("the state of numpy's generator was saved, but numpy cannot be imported")
        else:
            numpy.random.set_state(cast("dict[str, object]", tree["numpy"]))
    torch.set_rng_state(cast("SmallTensor", tree["torch"]).tensor())
    cuda = cast("list[SmallTensor]", tree["cuda"])
    here = torch.cuda.device_count() if cuda else 0
    for device, state in enumerate(cuda[:here]):
        torch.cuda.set_rng_state(state.tensor(), device)
    if len(cuda) > here:
        warnings.append(f"generators of {len(cuda)} CUDA devices were saved, {here} are here")
    return warnings


def generator_access(value: object) -> tuple[Callable[[], object], Callable[[object], object]] | None:
    """Return what reads and what writes the state of a generator object; None for any other object."""
    if isinstance(value, torch.Generator):
        return value.get_state, lambda state: value.set_state(cast("torch.Tensor", state))
    if type(value) is random.Random:
        return value.getstate, lambda state: value.setstate(cast("tuple[object, ...]", state))
    if "numpy" not in sys.modules:
        return None
    import numpy

    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.random.BitGenerator):
        return _numpy_access(value)
    if isinstance(value, numpy.random.RandomState):
        return lambda: value.get_state(legacy=False), lambda state: value.set_state(cast("dict[str, object]", state))
    return None


def _numpy_access(bits: numpy.random.BitGenerator) -> tuple[Callable[[], object], Callable[[object], object]]:
    def get() -> object:
        return bits.state

    def put(state: object) -> None:
        bits.state = cast("dict[str, object]", state)

    return get, put
