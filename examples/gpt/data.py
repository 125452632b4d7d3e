"""Text that every machine has: the source of Python's own standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library_text(limit: int = 4 << 20) -> bytes:
    """The first `limit` bytes of the library's modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return b"".join(parts)[:limit]


class Batches:
    """Random windows of the text. Has a state of its own, so that a resumed run goes on with the next window."""

    def __init__(self, text: bytes, *, batch: int, length: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch = batch
        self._length = length
        self._generator = torch.Generator().manual_seed(seed)
        self.served = 0

    def next(self) -> Tensor:
        """One batch of tokens, [batch, length + 1]: each row's tail is the target of its head."""
        starts = torch.randint(len(self._text) - self._length, (self._batch, 1), generator=self._generator)
        self.served += 1
        return self._text[starts + torch.arange(self._length + 1)].long()

    def state_dict(self) -> dict[str, object]:
        return {"generator": self._generator.get_state(), "served": self.served}

    def load_state_dict(self, state: dict[str, object]) -> None:
        generator, served = state["generator"], state["served"]
        assert isinstance(generator, Tensor) and isinstance(served, int)
        self._generator.set_state(generator)
        self.served = served
