"""The floors that disk numbers are held against, under the name that benchmarks know them by."""

from zerostall.flow.bare_disk import CHUNK, buffer, new_memory, read, write

__all__ = ["CHUNK", "buffer", "new_memory", "read", "write"]
