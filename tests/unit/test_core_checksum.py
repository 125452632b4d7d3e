"""Joined CRC-32C, against one computed bit by bit."""

from __future__ import annotations

import pytest

from zerostall.core import checksum


def crc32c(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_reference_has_the_published_check_value():
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("cut", range(10))
def test_combine(cut: int):
    data = b"123456789"
    assert checksum.combine(crc32c(data[:cut]), crc32c(data[cut:]), len(data) - cut) == 0xE3069283


def test_combine_of_zeros_over_exabytes_is_associative():
    a, b, c = 0x12345678, 0x9ABCDEF0, 0x0F1E2D3C
    near, far = 2**61 + 12345, 2**62 - 7
    left = checksum.combine(checksum.combine(a, b, near), c, far)
    right = checksum.combine(a, checksum.combine(b, c, far), near + far)
    assert left == right


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 32, 100])
def test_whole(nbytes: int):
    data = bytes(range(nbytes))
    chunks = [crc32c(data[at : at + 16]) for at in range(0, nbytes, 16)]
    assert checksum.whole(chunks, nbytes, 16) == crc32c(data)


@pytest.mark.parametrize(
    ("checksums", "nbytes", "chunk_bytes"),
    [
        ([1], 17, 16),
        ([1, 2], 16, 16),
        ([], 1, 16),
        ([-1], 16, 16),
        ([2**32], 16, 16),
        ([1], 16, 0),
        ([], -1, 16),
    ],
)
def test_whole_refuses_what_does_not_fit(checksums: list[int], nbytes: int, chunk_bytes: int):
    with pytest.raises(ValueError):
        checksum.whole(checksums, nbytes, chunk_bytes)


def test_combine_refuses_what_is_no_crc():
    for a, b, length in ((-1, 0, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 2**63)):
        with pytest.raises(ValueError):
            checksum.combine(a, b, length)
