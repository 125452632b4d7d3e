"""The measured loop of one rank: the GPT of benchmarks/stall, dealt out with DistributedDataParallel or FSDP2."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.stall.loop import SIZES, Loop, Size

MODELS = {
    **SIZES,
    "gpt-1.3b": Size(2048, 25, most=32),  # 15.2 GB of state
    "gpt-0.2b": Size(1024, 16, most=32),  # 2.4 GB, of which a disk takes a second
    "gpt-25m": Size(512, 8, most=8, context=64),  # 0.3 GB, for the CPU
}


class RankLoop(Loop):
    """As `Loop`, on one of several ranks."""

    def __init__(self, model: str, device: str, way: str) -> None:
        super().__init__(MODELS[model], device, flips=False)
        del self.optimizer
        self.net: nn.Module = self.model
        if way == "ddp":
            self.net = DistributedDataParallel(self.model, device_ids=[self.device] if self.clock.gpu else None)
        else:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.clock.gpu)

    def state(self) -> dict[str, object]:
        return {"model": self.net, "optimizer": self.optimizer}

    def gradients(self) -> torch.Tensor:
        tokens = self.tokens[: self.batch]
        with torch.autocast(self.device.type, torch.bfloat16):
            scores = self.net(tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def nbytes(self) -> int:
        """Bytes of the whole state, however it is dealt out."""
        tensors: list[torch.Tensor] = list(self.model.parameters())
        for one in self.optimizer.state.values():
            tensors += [value for value in one.values() if isinstance(value, torch.Tensor)]
        return sum((t.numel() * t.element_size()) if isinstance(t, DTensor) else t.nbytes for t in tensors)
