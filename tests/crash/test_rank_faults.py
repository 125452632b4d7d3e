"""A disk that refuses one rank's image costs all ranks that step alone, and each hears which file it was."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerostall
from crash.conftest import StartAgent
from crash.nursery import Nursery
from hand import wait_until
from ranks.world import Ranks
from shim.faults import Faults, Shim


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with contextlib.closing(Nursery("rank", os.environ)) as nursery:
        yield nursery


@pytest.mark.parametrize(("op", "error"), [("write", "EIO"), ("open", "ENOSPC"), ("fsync", "EIO")])
def test_what_is_refused_to_one_rank_is_told_to_all(
    start_agent: StartAgent,
    nursery: Nursery,
    faulty: Shim,
    agent_environment: dict[str, str],
    where: Path,
    tmp_path: Path,
    op: str,
    error: str,
) -> None:
    start_agent()
    mended = tmp_path / "mended"
    with Faults(faulty, op=op, match="*/rank-00002.safetensors", error=error) as fault:
        ranks = Ranks(nursery, tmp_path, agent_environment, 3, "disk_fails", where, mended)
        try:
            wait_until(lambda: all("first" in ranks.said(rank) or ranks.rank[rank].ended() for rank in range(3)), 90)
        except BaseException:
            ranks.kill()
            raise
        assert fault.hits
    assert not [snapshot for snapshot in zerostall.snapshots(where) if snapshot.clean]
    mended.touch()
    for said in ranks.wait():
        (first,) = re.findall(r"^first (.*)", said, re.MULTILINE)
        assert first.startswith("StorageError") and "rank-00002.safetensors" in first, first
        assert "second clean" in said
    assert [verdict.problems for verdict in zerostall.verify(where, 2)] == [()]
