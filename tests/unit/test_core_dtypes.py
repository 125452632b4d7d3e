"""Data types: all that torch has, in its sizes, and every one readable with safetensors."""

from __future__ import annotations

import random

import pytest

from zerostall.core import layout
from zerostall.core.dtypes import CODES, DTYPES
from zerostall.core.layout import Shard

torch = pytest.importorskip("torch")
ALL = sorted({str(found).removeprefix("torch.") for found in vars(torch).values() if isinstance(found, torch.dtype)})


def test_every_type_of_torch_is_known():
    quantized = {name for name in ALL if name.startswith(("qint", "quint"))}
    names = set(ALL) - quantized - {"bit"}  # `bit` exists since 2.13 by name alone: it has no size
    assert names <= set(DTYPES)
    assert not quantized & set(DTYPES)
    for name in names:
        assert getattr(torch, name).itemsize == DTYPES[name].itemsize


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (5, 3)])
def test_safetensors_gives_the_same_bits(shape: tuple[int, ...]):
    from safetensors.torch import load

    made = layout.build([Shard.whole(name, name, shape) for name in DTYPES])
    luck = random.Random(5)
    data = bytearray(luck.randbytes(made.nbytes - len(made.header)))
    begin = len(made.header)
    for entry in made.entries:
        if entry.dtype == "bool":
            data[entry.offset - begin : entry.offset - begin + entry.nbytes] = b"\1" * entry.nbytes
    image = made.header + bytes(data)
    found = load(image)
    assert set(found) == set(DTYPES)
    for entry in made.entries:
        tensor = found[entry.name]
        assert tuple(tensor.shape) == shape + DTYPES[entry.dtype].trailing
        bits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert bits == image[entry.offset : entry.offset + entry.nbytes]


def test_codes_are_of_the_same_size():
    for code, dtype in CODES.items():
        assert DTYPES[dtype.name] is dtype
        assert code == dtype.code or dtype.code in ("U8", "F32")
    for dtype in DTYPES.values():
        size = CODES[dtype.code].itemsize * (dtype.trailing[0] if dtype.trailing else 1)
        assert size == dtype.itemsize
