"""Images whose chunks another writer made of another size: the format lets it, so they are restored."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import zerostall
from conftest import stop_agent
from images import images_of, manifest_of
from zerostall import native
from zerostall.core import checksum
from zerostall.tiers.contract import Image
from zerostall.tiers.disk import DiskTier

SIZE = 8192


@pytest.mark.parametrize("alias", [False, True], ids=["as-saved", "aliases-apart"])
def test_from_disk(tmp_path: Path, own_agent: Path, forked_agents: None, alias: bool) -> None:
    saved = {"w": torch.arange(9000.0), "b": torch.ones(3)}
    saved["part"] = saved["w"][5:8000:7]
    with zerostall.Checkpointer(tmp_path, rng=False, s=saved) as ckpt:
        ckpt.save(1).wait("disk", timeout=60)
    stop_agent(own_agent)
    pool = native.Pool("test", 1)
    disk = DiskTier(tmp_path, pool)
    here, (data,) = disk.open(1, 0), images_of(disk, 1, 1)
    held = np.frombuffer(data, dtype=np.uint8)
    sums = [native.crc32c(data[at : at + SIZE]) for at in range(0, len(data), SIZE)]
    assert len(sums) > 4 and checksum.whole(sums, len(data), SIZE) == here.record.checksum
    other = msgspec.structs.replace(here.record, step=2, chunk_bytes=SIZE, checksums=sums)
    disk.put(Image(here.layout, other, held.ctypes.data))
    disk.commit(manifest_of(other))
    pool.close()
    found = {name: torch.zeros(tensor.shape) for name, tensor in saved.items()}
    if not alias:
        found["part"] = found["w"][5:8000:7]
    with zerostall.Checkpointer(tmp_path, rng=False, s=found) as ckpt:
        assert ckpt.restore() == 2 and ckpt.stats.restored_from == "disk"
    assert all(torch.equal(found[name], saved[name]) for name in saved)
