"""CRC-32C of joined pieces, from the CRC-32C of each.

A CRC is the remainder of a polynomial division, so that of `a + b` is that of `a`, multiplied by x to the
power of b's bits, plus that of `b`. Polynomials are kept as the CRC is: bit 31 is the coefficient of x^0.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_POLYNOMIAL = 0x82F63B78
_ONE = 0x80000000
_X = _ONE >> 1


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@cache
def _square(k: int) -> int:
    """x^(8 * 2^k)."""
    if k:
        return _multiply(_square(k - 1), _square(k - 1))
    return _X >> 7


@lru_cache(maxsize=64)
def _power(nbytes: int) -> int:
    """x^(8 * nbytes)."""
    if not 0 <= nbytes < 1 << 63:
        raise ValueError(f"{nbytes} is no number of bytes")
    result = _ONE
    for k in range(nbytes.bit_length()):
        if nbytes >> k & 1:
            result = _multiply(_square(k), result)
    return result


def _check(crc: int) -> int:
    if not 0 <= crc <= 0xFFFFFFFF:
        raise ValueError(f"{crc} is no CRC-32C")
    return crc


def combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """Return the CRC-32C of a + b, from the CRC-32C of each and b's length in bytes. ValueError for what is
    neither.
    """
    return _multiply(_power(len_b), _check(crc_a)) ^ _check(crc_b)


@lru_cache(maxsize=8)
def _tables(nbytes: int) -> tuple[list[int], list[int], list[int], list[int]]:
    # Multiplying by a constant is linear: four look-ups, one for each byte of the CRC.
    factor = _power(nbytes)

    def table(shift: int) -> list[int]:
        products = [0] * 256
        for bit in range(8):
            product = _multiply(factor, 1 << (shift + bit))
            for low in range(1 << bit):
                products[(1 << bit) | low] = products[low] ^ product
        return products

    return table(0), table(8), table(16), table(24)


def whole(checksums: Sequence[int], nbytes: int, chunk_bytes: int) -> int:
    """Return the CRC-32C of an image from those of its chunks.

    Every chunk has `chunk_bytes` bytes but the last, which has what is left of `nbytes`. ValueError where the
    number of chunks does not fit. About 0.4 µs a chunk.
    """
    if chunk_bytes < 1 or nbytes < 0 or len(checksums) != -(-nbytes // chunk_bytes):
        raise ValueError(f"{len(checksums)} chunks of {chunk_bytes} bytes do not make {nbytes} bytes")
    if not checksums:
        return 0
    _check(min(checksums))
    _check(max(checksums))
    t0, t1, t2, t3 = _tables(chunk_bytes)
    crc = checksums[0]
    last = len(checksums) - 1
    for index in range(1, last):
        crc = t0[crc & 255] ^ t1[crc >> 8 & 255] ^ t2[crc >> 16 & 255] ^ t3[crc >> 24] ^ checksums[index]
    return combine(crc, checksums[last], nbytes - last * chunk_bytes) if last else crc
