"""State that is dealt out over ranks: any way of dealing it out is restored into any other, bit for bit."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

import zerostall
from conftest import stop_agent
from free_ports import free_ports
from ranks.sharded import same
from ranks.world import Start

pytestmark = pytest.mark.timeout(900)  # several processes that torch makes slow to start, on a machine that may be busy


HOPS = [
    ("ddp", 2),
    ("fsdp", 4),
    ("2d", 4),
    ("zero", 3),
    ("3d", 8),  # and on as three, one and four
    ("fsdp", 3),
    ("ddp", 1),
    ("hsdp", 4),
    ("stages", 2),
    ("sp", 2),
    ("tp", 2),
    ("fsdp1-orig", 2),
    ("mixed", 2),
    ("fsdp1-mixed", 3),
]
FLAT_HOPS = [
    ("fsdp1-hybrid", 4),
    ("fsdp1-orig-grads", 2),
    ("ddp", 2),
    ("fsdp1-orig-hybrid", 4),
    ("fsdp1-whole", 2),
    ("fsdp1-whole", 1),
    ("zero", 2),
    ("fsdp1-orig-whole", 2),
    ("fsdp1-orig", 3),
    ("ddp", 1),
    ("fsdp1", 3),
]


@pytest.mark.long
def test_every_way_of_fsdps_first_version_is_restored_into_every_other(start: Start, tmp_path: Path) -> None:
    go_through(start, tmp_path, FLAT_HOPS)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-orig"])
def test_fsdps_first_version_is_saved_between_steps_whatever_is_gathered(
    start: Start, tmp_path: Path, kind: str
) -> None:
    assert all("same" in said for said in start(2, "flat_loop", tmp_path / "run", kind).wait())


def go_through(start: Start, tmp_path: Path, hops: list[tuple[str, int]]) -> int:
    """A run that goes on on other numbers of ranks, dealt out in other ways, each time from what the last has saved."""
    where, expected = tmp_path / "run", tmp_path / "expected"
    expected.mkdir()
    for step, (kind, size) in enumerate(hops):
        for said in start(size, "hop", where, kind, 1, expected).wait():
            assert f"restored {step} " in said
            assert f"saved {step + 1}" in said
    return len(hops)


def test_every_way_of_dealing_out_is_restored_into_every_other(start: Start, tmp_path: Path) -> None:
    where, expected = tmp_path / "run", tmp_path / "expected"
    step = go_through(start, tmp_path, HOPS)
    difference = zerostall.diff(where, 2, 3)
    assert not (difference.only_a or difference.only_b or difference.reshaped)
    names = {changed.name for changed in difference.changed}
    assert {"model.inner.weight", "optimizer.table.weight.exp_avg", "optimizer.norm.bias.step"} <= names
    for number in range(1, step + 1):
        assert [verdict.problems for verdict in zerostall.verify(where, number)] == [()]
        loaded = zerostall.load(where, number)
        found = {f"model.{name}": tensor for name, tensor in loaded["model"].items()}
        for name, state in loaded["optimizer"]["state"].items():
            found |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
        found.pop("model.head.weight")  # tied, and told once by torch
        assert not same(found, torch.load(expected / f"{number}")), number


def test_every_way_over_every_mesh_is_restored_into_every_other(start: Start, tmp_path: Path) -> None:
    """Model and optimizer, one to three dimensions, one to eight ranks: parts of unequal size, none at all, strips."""
    empty = strips = 0
    for said in start(8, "any_to_any", tmp_path / "run").wait():
        counts = re.search(r"^restored (\d+) empty (\d+) strips (\d+)", said, re.MULTILINE)
        assert counts is not None and int(counts[1]) >= 7 * 4, said
        empty += int(counts[2])
        strips += int(counts[3])
    assert empty > 50 and strips > 20


def test_data_goes_on_where_all_ranks_together_were_whatever_their_number(start: Start, tmp_path: Path) -> None:
    """Each number is seen once, though two ranks begin, three go on, and one ends."""
    seen: list[int] = []
    step = 0
    for size, batch, steps in ((2, 3, 2), (3, 2, 2), (1, 4, 2)):
        before = f"restored {step}"
        for said in start(size, "samples", tmp_path / "run", batch, steps).wait():
            assert before in said, said
            seen += [int(word) for line in re.findall(r"^seen (.*)", said, re.MULTILINE) for word in line.split()]
        step += steps
    assert sorted(seen) == list(range(60))


LAUNCHERS = {
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1"},
    "kubernetes": {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "gpt-worker-0", "PET_NNODES": "1"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_a_cluster_started_meet_by_its_environment(start: Start, tmp_path: Path, launcher: str) -> None:
    """As `srun`, and a pod of the training operator, start them: torch.distributed finds the others by `env://`."""
    (port,) = free_ports(1)
    environment = {**LAUNCHERS[launcher], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    of_rank = {rank: {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)}
    where = tmp_path / "run"
    ranks = start(2, "train", where, 2, environment=environment, of_rank=of_rank, meeting="env")
    for said in ranks.wait():
        assert "saved 2" in said and "tasks of this step" not in said, said


def test_what_ranks_should_have_alike_and_do_not_is_said_by_name_and_rank(start: Start, tmp_path: Path) -> None:
    assert all("saved" in said for said in start(4, "loud", tmp_path / "run").wait())


def test_every_kind_of_state_comes_back_to_as_many_ranks_and_each_byte_is_stored_once(
    start: Start, tmp_path: Path
) -> None:
    where = tmp_path / "run"
    assert all("same" in said for said in start(3, "kinds", where).wait())
    images = sorted((where / "step-000000000001").glob("*.safetensors"))
    sizes = [image.stat().st_size for image in images]
    stored = 2 * 60_000 * 4 + 30_000 * 8  # of big, alike, array
    assert sum(sizes) < stored + 3 * 12_000
    assert max(sizes) < 1.4 * min(sizes)
    loaded = zerostall.load(where, 1)
    assert loaded["s"]["slice"].tolist() == loaded["s"]["big"][3:5, 7:9].tolist()
    assert torch.equal(loaded["s"]["columns"], loaded["s"]["big"][:5, :7])
    assert torch.equal(loaded["s"]["alike"], loaded["s"]["big"])
    assert all("refused" in said for said in start(2, "other_world", where).wait())


def test_what_is_each_ranks_own_stays_so_and_what_only_some_call_is_told(start: Start, tmp_path: Path) -> None:
    where = tmp_path / "run"
    assert all("same" in said for said in start(3, "own_values", where).wait())
    for said in start(2, "fewer_with_own_values", where).wait():
        assert "same" in said and "values differ between the 3 ranks that saved" in said
        assert "s.groups[0].ids[0] (rank" in said


KILLED = [
    ("ddp", 2),
    ("fsdp", 3),
    ("mixed", 2),  # low precision, and parameters in host memory between uses
    ("hsdp", 4),
    ("tp", 2),
    ("sp", 2),
    ("2d", 4),
    ("3d", 8),
    ("stages", 2),
    ("zero", 3),
    ("fsdp1", 2),
    ("fsdp1-orig-mixed", 2),
]


@pytest.mark.parametrize(("kind", "size"), KILLED)
def test_killed_and_resumed_is_bit_equal(start: Start, tmp_path: Path, kind: str, size: int) -> None:
    expected = tmp_path / "expected"
    start(size, "resumed", tmp_path / "whole", kind, 5, expected).wait()
    broken = start(size, "resumed", tmp_path / "broken", kind, 5, expected)
    deadline = time.monotonic() + 120
    while "step 2" not in broken.said(0) and not broken.rank[0].ended():
        assert time.monotonic() < deadline, broken.said(0)
        time.sleep(0.002)
    broken.kill()
    for said in start(size, "resumed", tmp_path / "broken", kind, 5, expected).wait():
        assert "equal" in said and "restored 0" not in said


def test_from_disk_each_byte_is_read_once_on_a_node_whoever_needs_it(start: Start, tmp_path: Path) -> None:
    assert all("same" in said for said in start(2, "read_once", tmp_path / "run").wait())


def test_damage_on_one_rank_takes_all_of_them_to_the_step_before(
    start: Start, tmp_path: Path, agent_environment: dict[str, str]
) -> None:
    where, expected = tmp_path / "run", tmp_path / "expected"
    expected.mkdir()
    start(2, "hop", where, "fsdp", 1, expected).wait()
    start(2, "hop", where, "fsdp", 1, expected).wait()
    stop_agent(Path(agent_environment["ZEROSTALL_RUNTIME_DIR"]))
    image = where / "step-000000000002" / "rank-00001.safetensors"
    data = bytearray(image.read_bytes())
    data[-3] ^= 4
    image.write_bytes(data)
    for said in start(3, "hop", where, "ddp", 1, expected).wait():
        assert "step 2 in disk is skipped" in said and "checksum" in said
        assert "restored 1 disk" in said
