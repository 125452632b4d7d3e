"""Loaders that know their place in the data, as torchdata makes them, go on with the very next batch."""

from __future__ import annotations

import pytest
import torch

from state_trip import restore, save

pytest.importorskip("torchdata", reason="torchdata is not installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("taken", [0, 4, 7])
def test_a_stateful_loader_goes_on_with_the_next_batch(taken: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def loader() -> StatefulDataLoader:
        data = torch.arange(41)
        sampler = StatefulDistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)
        return StatefulDataLoader(data, batch_size=3, sampler=sampler, num_workers=0)

    whole, stopped, fresh = loader(), loader(), loader()
    batches = [batch.tolist() for batch in whole]
    running = iter(stopped)
    assert [next(running).tolist() for _ in range(taken)] == batches[:taken]
    restore(save(loader=stopped), loader=fresh)
    assert [batch.tolist() for batch in fresh] == batches[taken:]
