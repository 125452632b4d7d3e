"""Which targets lie in memory that nobody can write to, a file that is mapped for reading for instance.

torch does not know: writing there ends the process. The kernel does.
"""

from __future__ import annotations

import bisect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerostall.trainer.state import tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.trainer.state.tensors import Holder

_READ_ONLY = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .-", re.MULTILINE)  # a line of /proc/self/maps
READ_ONLY = "the target's memory can only be read, such as a file that is mapped for reading"


def read_only(pairs: Iterable[tuple[str, Holder]]) -> dict[str, str]:
    """Return the names of targets in such memory, each with what is said of it; none where there is no /proc."""
    refused: dict[str, str] = {}
    lent = [(name, holder) for name, holder in pairs if _is_lent(tensors.own(holder))]
    if not lent:
        return refused
    starts, stops = _read_only_stretches()  # the kernel takes a millisecond or two to list them
    for name, holder in lent:
        where = tensors.geometry(holder)
        first = bisect.bisect_right(stops, where.start)
        if first < len(starts) and starts[first] < where.stop:
            refused[name] = READ_ONLY
    return refused


def _is_lent(own: Holder) -> bool:
    """Return whether somebody else's memory may be behind it: what torch has from its allocator can be resized."""
    return not (isinstance(own, torch.Tensor) and (not own.is_cpu or own.untyped_storage().resizable()))


def _read_only_stretches() -> tuple[list[int], list[int]]:
    """Where they begin and end, rising."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return [], []
    stretches = _READ_ONLY.findall(maps)
    return [int(start, 16) for start, _ in stretches], [int(stop, 16) for _, stop in stretches]
