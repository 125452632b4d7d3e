"""DTensor parameters, as FSDP2 makes them: what is here of them is updated and flips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn import Parameter

from optim.test_flips import PLENTY, SlowReader
from zerostall import optim


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_local_part_flips(mesh: object) -> None:
    whole = torch.randn(64, 8)
    sharded = Parameter(distribute_tensor(whole, mesh, [Shard(0)]))  # type: ignore[arg-type]
    plain = Parameter(whole.clone())
    ours, theirs = optim.AdamW([sharded]), optim.AdamW([plain])
    reader = SlowReader()
    assert ours.flip_for(reader, PLENTY) is None
    for number in range(4):
        gradient = torch.randn(64, 8)
        sharded.grad = distribute_tensor(gradient, mesh, [Shard(0)])  # type: ignore[arg-type]
        plain.grad = gradient
        if number:
            if reader.claims:
                reader.claims[-1].read = True
            state = ours.state[sharded]
            reader.begin([state[key].to_local() for key in ("exp_avg", "exp_avg_sq")] + [sharded.detach().to_local()])
        ours.step()
        theirs.step()
        if number:
            assert sorted(reader.left) == [0, 1] and list(reader.kept) == [2]
            reader.assert_intact()
        for key, expected in theirs.state[plain].items():
            found = ours.state[sharded][key]
            assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, expected)
        assert torch.equal(sharded.detach().full_tensor(), plain.detach())
