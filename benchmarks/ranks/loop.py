"""The measured loop of one rank: the GPT of benchmarks/stall, dealt out with DDP, FSDP2 or FSDP2 x TP."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.stall.loop import SIZES, Loop, Size

MODELS = {
    **SIZES,
    "gpt-1.3b": Size(2048, 25, most=32),  # 15.2 GB of state
    "gpt-0.2b": Size(1024, 16, most=32),  # 2.4 GB, of which a disk takes a second
    "gpt-25m": Size(512, 8, most=8, context=64),  # 0.3 GB, for the CPU
}


TENSOR_PARALLEL = 2  # ranks that share each large matrix, of "2d"
# Heads are computed by all: the model views what `qkv` gives as it was before it was dealt out.
PLAN = {
    "qkv": ColwiseParallel(output_layouts=Replicate()),
    "out": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
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
            mesh = None
            if way == "2d":
                size = torch.distributed.get_world_size()
                grid = (size // TENSOR_PARALLEL, TENSOR_PARALLEL)
                both = init_device_mesh(self.device.type, grid, mesh_dim_names=("fsdp", "tp"))
                mesh = both["fsdp"]
                for block in self.model.blocks:
                    parallelize_module(block, both["tp"], PLAN)
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self._groups(), lr=1e-4, fused=self.clock.gpu)

    def _groups(self) -> list[dict[str, object]]:
        """Parameters by the mesh that they are dealt out over: one fused update takes one mesh."""
        groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for one in self.model.parameters():
            groups.setdefault(one.device_mesh if isinstance(one, DTensor) else None, []).append(one)
        return [{"params": group} for group in groups.values()]

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
        return sum((t.numel() * t.element_size()) if isinstance(t, DTensor) else t.nbytes for t in self.tensors())

    def held_bytes(self) -> int:
        """Bytes of it that are on this rank."""
        return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state."""
        found: list[torch.Tensor] = list(self.model.parameters())
        for one in self.optimizer.state.values():
            found += [value for value in one.values() if isinstance(value, torch.Tensor)]
        return found
