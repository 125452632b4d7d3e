"""Random generators: those of the process (python, numpy, torch, CUDA), and objects the user hands over."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from zerostall import native
from zerostall.errors import FormatError
from zerostall.telemetry import say_once
from zerostall.trainer.state.refs import SmallTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy

_WORDS = 624
_TWISTER_BYTES = 4 * _WORDS + 4  # a Mersenne twister in memory: its words and its position


class _Never:
    """Stands where nothing tells that something is still the same."""

    def same(self) -> bool:
        return False


_NEVER = _Never()


def _if_still(block: native.Block) -> native.Block | _Never:
    """A block from before a state was read tells of it: unless another thread has drawn in between."""
    return block if block.same() else _NEVER


class _Python:
    """The generator of `random`: its state as it was read last, and what tells that it is still that.

    Reading takes 10 to 20 us and fills the caches, comparing memory much less. The normal number that the generator may
    have in stock is an attribute, which is watched with those of the module: whose method is called.
    """

    _place = object.__basicsize__
    # The class below random.Random is the twister in C; it keeps nothing else between an object's head and its end.
    _fits = 0 <= random.Random.__mro__[1].__basicsize__ - object.__basicsize__ - _TWISTER_BYTES < 8

    def __init__(self) -> None:
        self.block: native.Block | _Never = _NEVER
        self.watch: native.Watch | _Never = _NEVER
        self.state: tuple[object, ...] = ()

    def read(self) -> None:
        generator = cast("object", getattr(random.getstate, "__self__", None))
        self.watch = _NEVER
        if not self._fits or type(generator) is not random.Random:
            self.state = random.getstate()
            return
        block = native.Block(id(generator) + self._place, _TWISTER_BYTES, generator)
        watch = native.Watch([random.__dict__, generator.__dict__])
        self.state = random.getstate()
        if self.state[2] is None:
            self.block, self.watch = _if_still(block), watch


class _Numpy:
    """That of `numpy.random`, likewise; None while numpy is not imported.

    The memory does not hold the normal number that it may have in stock, so that an answer is kept only while there was
    none: making one moves the generator on. Which generator it is lies in the memory of an object of its own.
    """

    def __init__(self) -> None:
        self.block: native.Block | _Never = _NEVER
        self.choice: native.Block | _Never = _NEVER
        self.generator: object = None
        self.state: object = None

    def read(self) -> None:
        if "numpy" not in sys.modules:
            return
        random = sys.modules["numpy"].random
        self.generator, self.block = random.get_bit_generator(), _NEVER
        choice = _memory_with(getattr(random.get_state, "__self__", None), self.generator)
        if type(self.generator).__name__ != "MT19937" or choice is None:
            self.state = random.get_state(legacy=False)
            return
        address = cast("numpy.random.MT19937", self.generator).ctypes.state_address
        block = native.Block(address, _TWISTER_BYTES, self.generator)
        self.state = state = random.get_state(legacy=False)
        if not state["has_gauss"]:
            self.block, self.choice = _if_still(block), _if_still(choice)


def _memory_with(owner: object, pointee: object) -> native.Block | None:
    """The memory of an object that C made and that points to the other: another in its place is seen there."""
    head = object.__basicsize__
    nbytes = type(owner).__basicsize__ - head
    if nbytes <= 0 or struct.pack("P", id(pointee)) not in ctypes.string_at(id(owner) + head, nbytes):
        return None
    return native.Block(id(owner) + head, nbytes, owner)


class _Torch:
    """torch's CPU generator: a block of its own on the heap, if that is seen to tell each change."""

    def __init__(self) -> None:
        self.block: native.Block | _Never = _NEVER
        self.state = torch.empty(0)
        self._tells: bool | None = None

    def read(self) -> None:
        if self._tells is None:
            self._tells = block_tells()
        if not self._tells:
            self.state = torch.default_generator.get_state()
            return
        block = _block_of(torch.default_generator)
        self.state = torch.default_generator.get_state()
        self.block = _if_still(block)


def _block_of(generator: torch.Generator) -> native.Block:
    return native.Block(cast("int", generator._cdata), None, generator)  # type: ignore[attr-defined]


def block_tells() -> bool:
    """Find out whether the block of a generator tells each change that there is, and is silent where there is none."""
    generator = torch.Generator()
    first = generator.get_state()
    changes: tuple[Callable[[], object], ...] = (
        lambda: torch.rand(1, generator=generator),
        lambda: torch.randn(1, generator=generator),
        lambda: torch.randn(1, dtype=torch.float64, generator=generator),  # leaves a second number in stock
        lambda: torch.randn(1, dtype=torch.float64, generator=generator),
        lambda: torch.randperm(5, generator=generator),
        lambda: torch.rand(1000, generator=generator),
        lambda: generator.manual_seed(7),
        lambda: generator.set_state(first),
    )
    reason = ""
    try:
        for change in changes:
            block, before = _block_of(generator), generator.get_state()
            if not block.same() or len(block) < _TWISTER_BYTES:
                reason = "its memory does not lie still"
            change()
            if block.same() or torch.equal(generator.get_state(), before):
                reason = "its memory does not tell each change"
    except (AttributeError, TypeError, ValueError) as error:
        reason = str(error)
    if reason:
        say_once("torch-generator", "torch's CPU generator is read in full at each save, 10 us: %s", reason)
    return not reason


class _OnDevice:
    """The generator of one CUDA device: its state is a seed and an offset, and reading it takes ten times as long."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = torch.empty(0)
        self._numbers: tuple[int, int] | None = None
        self._tells = hasattr(generator, "get_offset")

    def read(self) -> torch.Tensor:
        if not self._tells:
            return self.generator.get_state()
        numbers = (self.generator.initial_seed(), cast("int", self.generator.get_offset()))  # type: ignore[attr-defined]
        if numbers != self._numbers:
            self.state = self.generator.get_state()
            if self._numbers is None:  # more than these two would not be noticed
                self._tells = bytes(self.state.tolist()) == struct.pack("=Qq", *numbers)
            self._numbers = numbers
        return self.state


CUDA = torch.backends.cuda.is_built()


class Generators:
    """Reads this process's generators, for one state.

    What it keeps between reads is its own: another state is saved on another thread, in the middle of a read.
    """

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = _Python(), _Numpy(), _Torch()
        self._on_devices: list[_OnDevice] = []
        self._asked: tuple[torch.Generator, ...] | None = None  # whose these are
        self._latest: GeneratorStates | None = None
        # Tells at once of all processors' generators that were read last: to ask each takes longer than to compare all.
        self._still: native.Still | _Never = _NEVER

    def read(self) -> GeneratorStates:
        """Read those that were used since they were read last."""
        here = self.read_on_devices()
        latest = self._latest
        still = self._still.same()
        if still and not here and latest is not None and not latest.cuda:
            return latest
        signs = latest.signs if latest is not None else None
        python, numpy, torch = self._python, self._numpy, self._torch
        if not still:
            if not torch.block.same():
                torch.read()
            if not (python.block.same() and python.watch.same()):
                python.read()
            if not (numpy.block.same() and numpy.choice.same()):
                numpy.read()
            found = torch.block, python.block, python.watch, numpy.block, numpy.choice
            known = [sign for sign in found if not isinstance(sign, _Never)]
            signs = known if len(known) == len(found) else None
            self._still = _NEVER if signs is None else native.Still(signs)
        self._latest = latest = GeneratorStates(python.state, numpy.state, torch.state, here, signs, self)
        return latest

    def read_on_devices(self) -> list[torch.Tensor]:
        """Return the states of the CUDA devices' generators; none where CUDA is not up: a save does not start it."""
        if not CUDA or not torch.cuda.is_initialized():
            return []
        return self.states_on_devices(torch.cuda.default_generators)

    def states_on_devices(self, generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
        """Return the state of each, of those that were not used since as it was read last."""
        if self._asked is not generators:  # torch's own are in a tuple
            if len(self._on_devices) != len(generators) or any(
                one.generator is not generator for one, generator in zip(self._on_devices, generators, strict=True)
            ):
                self._on_devices = list(map(_OnDevice, generators))
            self._asked = generators if type(generators) is tuple else None
        return [one.read() for one in self._on_devices]


class GeneratorStates(msgspec.Struct):
    """The states of this process's generators at one moment.

    Attributes:
        python: of `random`.
        numpy: of numpy's global generator, None where numpy is not imported.
        torch: of torch's CPU generator.
        cuda: of each CUDA device's, empty where CUDA was not used.
        signs: what tells that the processor's are as they were read here; None where nothing does.
        reader: who read them.
    """

    python: tuple[object, ...]
    numpy: object
    torch: torch.Tensor
    cuda: list[torch.Tensor]
    signs: list[native.Block | native.Watch] | None
    reader: Generators

    def again(self) -> GeneratorStates:
        """Return what they are at another moment at which nothing but devices' generators may have changed."""
        cuda = self.reader.read_on_devices()  # CUDA may have come up since
        if not cuda and not self.cuda:
            return self
        return msgspec.structs.replace(self, cuda=cuda)

    def alike(self, other: GeneratorStates) -> bool:
        """Whether the processor's were read only once for both."""
        return self.python is other.python and self.numpy is other.numpy and self.torch is other.torch

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
