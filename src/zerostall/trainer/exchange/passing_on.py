"""What one rank of a group has read, to all others; and what went wrong on one, too."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from zerostall.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALL = 1 << 20


class Beginning:
    """What each rank of a group does by itself before all of them pass on what they read: `with Beginning(...)`.

    Where one cannot, the others hear of it at `over()`, instead of waiting for it in vain. Without a group, nothing.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._device = device
        self._group = group

    def over(self) -> None:
        """This rank is through.

        Raises:
            CorruptError: another one is not, and why.
        """
        self._say("")

    def _say(self, problem: str) -> None:
        group, self._group = self._group, None
        if group is not None:
            agree(problem, self._device, group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.over()
        elif isinstance(error, Exception):
            with contextlib.suppress(CorruptError):  # its own error is what this rank raises
                self._say(f"{type(error).__name__}: {error}")


def agree(problem: str, device: torch.device, group: dist.ProcessGroup) -> None:
    """Raise on all ranks what went wrong on any."""
    bad = torch.tensor([bool(problem)], dtype=torch.int32, device=device)
    dist.all_reduce(bad, group=group)
    if not bad.item():
        return
    told: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, problem, group=group)
    raise CorruptError("; ".join(f"rank {rank}: {one}" for rank, one in enumerate(told) if one))


def pass_on(shares: Sequence[Sequence[torch.Tensor]], device: torch.device, group: dist.ProcessGroup) -> None:
    """Every rank's flat tensors to all others: large ones by themselves, small ones together."""
    work: list[dist.Work | None] = []
    packed: list[tuple[torch.Tensor, list[torch.Tensor], bool]] = []
    me = dist.get_rank(group)
    for owner, targets in enumerate(shares):
        source = dist.get_global_rank(group, owner)
        small = [target for target in targets if 0 < target.numel() < _SMALL]
        for target in targets:
            if target.numel() >= _SMALL:
                work.append(dist.broadcast(target, source, group=group, async_op=True))
        if small:
            pack = (
                torch.cat(small)
                if owner == me
                else torch.empty(sum(map(torch.numel, small)), dtype=torch.uint8, device=device)
            )
            packed.append((pack, small, owner == me))
            work.append(dist.broadcast(pack, source, group=group, async_op=True))
    for one in work:
        if one is not None:
            one.wait()
    for pack, small, mine in packed:
        if not mine:
            for target, part in zip(small, pack.split([one.numel() for one in small]), strict=True):
                target.copy_(part)
