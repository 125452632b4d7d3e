"""CRC-32C: the standard's vectors, and that it does not matter where bytes are split or lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostall.native import crc32c, crc32c_memory


def by_definition(data: bytes) -> int:
    """Bit by bit, from the definition: reflected polynomial 0x82F63B78, all ones at both ends."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # these four are RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_values(data: bytes, value: int) -> None:
    assert crc32c(data) == value


@given(st.binary(max_size=600))
def test_is_the_definition(data: bytes) -> None:
    assert crc32c(data) == by_definition(data)


@given(st.integers(0, 100_000), st.data())
def test_splits_and_alignment_do_not_matter(nbytes: int, data: st.DataObject) -> None:
    array = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, dtype=np.uint8)
    shift = data.draw(st.integers(0, 63))
    part = array[shift : shift + nbytes]
    whole = crc32c(part.tobytes())
    cut = data.draw(st.integers(0, nbytes))
    assert crc32c(memoryview(part)[cut:], crc32c(memoryview(part)[:cut])) == whole
    assert crc32c_memory(part.ctypes.data, nbytes) == whole


def test_takes_buffers_only() -> None:
    assert crc32c(bytearray(b"123456789")) == crc32c(memoryview(b"123456789")) == 0xE3069283
    with pytest.raises(TypeError):
        crc32c("123456789")  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        crc32c(memoryview(b"123456789")[::2])
