"""State that is each rank's own, without a mark: values, stages, optimizers; and calls that only some ranks make."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import zerostall
from ranks.sharded import refused, say


def own_values(where: str) -> None:
    """Ranks with values, tensors and optimizers of their own; then what only some ranks call."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def state(fill: bool) -> dict[str, object]:
        stage = {f"stage{rank}.{i}": torch.full((3,), rank + i / 10 if fill else -1.0) for i in range(rank)}
        values = {"groups": [{"lr": 0.1, "ids": [rank, rank + 1] if fill else []}]}
        return {**values, "shared": torch.arange(5.0) if fill else torch.zeros(5), **stage}

    with zerostall.Checkpointer(where, rng=False, s=state(True)) as ckpt:
        ckpt.save(1).wait("disk", timeout=60)
    target = state(False)
    with zerostall.Checkpointer(where, rng=False, s=target) as ckpt:
        assert ckpt.restore() == 1
    assert same_tree(target, state(True)), target
    weight = torch.nn.Parameter(torch.full((4,), float(rank)))
    weight.grad = torch.full((4,), float(rank))
    optimizer = torch.optim.Adam([weight], foreach=False)
    optimizer.step()
    refused(where + "-numbered", hint="o[0][0].exp_avg: ", o=optimizer)
    pair = dist.new_group([0, 1])
    if rank < 2:
        with zerostall.Checkpointer(where + "-pair", rng=False, process_group=pair, s=state(True)) as ckpt:
            ckpt.save(1).wait("disk", timeout=60)
    dist.barrier()
    if rank == 0:
        os.environ["ZEROSTALL_RANKS_PATIENCE"] = "2"
        try:
            zerostall.Checkpointer(where + "-alone", rng=False, s=state(True))
        except zerostall.errors.WaitTimeoutError as error:
            assert f"ranks 1, 2 of {size}" in str(error), error
        else:
            raise AssertionError("a rank that saves alone is not told so")
    dist.barrier()
    say("same")


def fewer_with_own_values(where: str) -> None:
    """All that three ranks had of their own, on two."""
    rank = dist.get_rank()
    stages = {"stage1.0": torch.zeros(3)} if rank == 0 else {"stage2.0": torch.zeros(3), "stage2.1": torch.zeros(3)}
    target: dict[str, object] = {"groups": [{"lr": 0.0, "ids": []}], "shared": torch.zeros(5), **stages}
    with zerostall.Checkpointer(where, rng=False, s=target) as ckpt:
        assert ckpt.restore() == 1
    assert target["groups"] == [{"lr": 0.1, "ids": [rank, rank + 1]}]
    assert [tensor[0].item() for tensor in stages.values()] == ([1.0] if rank == 0 else [2.0, torch.tensor(2.1).item()])
    say("same")


def same_tree(one: dict[str, object], other: dict[str, object]) -> bool:
    tensors = {name for name, value in one.items() if isinstance(value, torch.Tensor)}
    values = all(one[name] == other[name] for name in one.keys() - tensors)
    return values and one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in tensors)  # type: ignore
