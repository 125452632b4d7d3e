"""FSDP's first version: a net dealt out by it in one way or another, and its whole state put together again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy


def dealt(net: nn.Module, kind: str) -> nn.Module:
    """By FSDP's first version: with the original parameters, in low precision, over some ranks or none."""
    options: dict[str, object] = {"use_orig_params": "orig" in kind, "device_id": torch.device("cpu")}
    if "mixed" in kind:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "hybrid" in kind:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    if "whole" in kind:
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    if "grads" in kind:
        options["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
    net.inner = FullyShardedDataParallel(net.inner, **options)
    net.outer = FullyShardedDataParallel(net.outer, **options)
    return FullyShardedDataParallel(net, **options)


def everything(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """By what FSDP's first version says of its shards (its own `full_optim_state_dict` mixes tensors up on a CPU)."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        found = {
            f"model.{name}".replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }
    pieces: dict[str, list[tuple[int, torch.Tensor, tuple[int, ...]]]] = {}
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        flat = wrapper._handle.flat_param
        prefix = next(name for name, module in model.named_modules() if module is wrapper)
        for number, info in enumerate(flat._shard_param_infos):
            held = flat if flat._params is None else flat._params[number]
            name = f"{prefix}.{flat._fqns[number]}".replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
            for key, value in optimizer.state.get(held, {}).items():
                shape = tuple(flat._shapes[number]) if value.dim() else ()
                part = value.detach().flatten()
                if value.dim() and flat._params is None:
                    part = part[info.offset_in_shard or 0 :][: info.numel_in_shard or 0]
                begin = (info.intra_param_start_idx or 0) if value.dim() else 0
                pieces.setdefault(f"optimizer.{name}.{key}", []).append((begin, part.clone(), shape))
    every: list[dict[str, list[tuple[int, torch.Tensor, tuple[int, ...]]]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, pieces)
    for one in every:
        for name, parts in one.items():
            for begin, part, shape in parts:
                full = found.setdefault(name, torch.empty(shape))
                full.view(-1)[begin : begin + part.numel()] = part
    return found
