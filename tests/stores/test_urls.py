"""What works on a folder works on a URL: import, ls, show, verify, diff, pin, export, load."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import zerostall
from forked import cli
from ranks.scripts import said_by_ranks
from stores.server import Server
from zerostall.errors import CorruptError, SnapshotNotFoundError, StepExistsError

TENSORS = {"layers.0.weight": np.arange(300_000, dtype=np.float32), "layers.0.bias": np.ones(7, np.float16)}


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server.new_bucket()


@pytest.fixture
def url(bucket: str, tmp_path: Path) -> str:
    """A run with two steps."""
    source = tmp_path / "source.safetensors"
    url = f"s3://{bucket}/runs/gpt 1"
    for step, scale in ((5, 1), (6, 2)):
        save_file({name: value * scale for name, value in TENSORS.items()}, source)
        zerostall.import_file(source, url, step, zerostall.ImportOptions(run="gpt"))
    return url


def test_a_run_below_a_url_is_listed_verified_compared_and_pinned(url: str) -> None:
    assert [(one.step, one.clean, one.pinned) for one in zerostall.snapshots(url)] == [
        (5, True, False),
        (6, True, False),
    ]
    assert all(verdict.clean for verdict in zerostall.verify(url))
    found = zerostall.diff(url, 5, 6)
    assert {row.name: row.changed_elements for row in found.changed} == {
        "model.layers.0.weight": 299_999,
        "model.layers.0.bias": 7,
    }
    zerostall.pin(url, 5)
    assert zerostall.snapshots(url)[0].pinned
    zerostall.pin(url, 5, False)
    assert not zerostall.snapshots(url)[0].pinned


def test_a_step_below_a_url_is_loaded_and_exported(url: str, tmp_path: Path) -> None:
    model = zerostall.load(url)["model"]
    assert isinstance(model, dict)
    assert torch.equal(model["layers.0.weight"], torch.from_numpy(TENSORS["layers.0.weight"] * 2))
    zerostall.export(url, 5, tmp_path / "out.safetensors", zerostall.ExportOptions(root="model"))
    found = load_file(tmp_path / "out.safetensors")
    assert all(np.array_equal(found[name], value) for name, value in TENSORS.items())


def test_damage_below_a_url_is_found(url: str, bucket: str, s3_server: Server) -> None:
    (key,) = (key for key in s3_server.keys(bucket) if "000006" in key and key.endswith(".safetensors"))
    data = bytearray(s3_server.object(bucket, key))
    data[-1] ^= 1
    s3_server.put(bucket, key, bytes(data))
    verdict = zerostall.verify(url, 6)[0]
    assert not verdict.clean and "chunk 0" in verdict.problems[0]
    with pytest.raises(CorruptError):
        zerostall.load(url, 6)
    s3_server.put(bucket, key, bytes(data[:-1]))
    assert not zerostall.snapshots(url)[1].clean
    assert isinstance(zerostall.load(url), dict)  # the newest clean one


def test_an_import_replaces_only_when_asked(url: str, tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    with pytest.raises(StepExistsError):
        zerostall.import_file(source, url, 6)
    zerostall.import_file(source, url, 6, zerostall.ImportOptions(replace=True))
    with pytest.raises(zerostall.errors.RunMismatchError):
        zerostall.import_file(source, url, 7, zerostall.ImportOptions(run="bert"))


def test_a_url_with_nothing_below_it_is_no_run(bucket: str) -> None:
    for call in (zerostall.snapshots, zerostall.load):
        with pytest.raises(SnapshotNotFoundError, match="holds no run"):
            call(f"s3://{bucket}/nothing")


def test_the_command_line_takes_urls(url: str) -> None:
    def run(*words: str) -> dict:
        done = cli(os.environ, *words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    listing = run("ls", url)
    assert listing["where"] == url
    assert [(row["step"], row["tiers"], row["clean"]) for row in listing["snapshots"]] == [
        (5, ["remote"], True),
        (6, ["remote"], True),
    ]
    assert run("show", url, "5")["where"] == url
    assert run("verify", url, "6")["clean"]


RANK = """
import sys
import torch, torch.distributed as dist
import zerostall
from zerostall.flow.checked_images import CheckedImage
from zerostall.trainer.exchange import store_reads
rank, store, url = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
store_reads.ROUND = 1
mine, load = [], CheckedImage.load
def counted(self, index, view):
    mine.append((self.number, index))
    load(self, index, view)
CheckedImage.load = counted
alone = zerostall.load(url)["model"]
chunks = sorted(mine)
mine.clear()
together = zerostall.load(url, process_group=dist.group.WORLD)["model"]
assert list(alone) == list(together) and len(alone) == 2
assert all(torch.equal(alone[name], together[name]) for name in alone)
every = [None] * 3
dist.all_gather_object(every, mine)
assert sorted(sum(every, [])) == chunks and len(chunks) == 3, every  # each once, whatever the number of ranks
assert all(every), every
dist.barrier()
def damaged(self, index, view):
    if rank == 1:
        raise zerostall.errors.CorruptError(f"chunk {index} fails its checksum")
    load(self, index, view)
CheckedImage.load = damaged
try:
    zerostall.load(url, process_group=dist.group.WORLD)
except zerostall.errors.CorruptError as error:
    print("told:", error)
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_ranks_ask_the_store_for_each_chunk_once(bucket: str, tmp_path: Path) -> None:
    source, url = tmp_path / "source.safetensors", f"s3://{bucket}/runs/large"
    save_file({"weight": np.arange(10 << 20, dtype=np.float32), "bias": np.ones(7, np.float16)}, source)
    zerostall.import_file(source, url, 1, zerostall.ImportOptions(run="gpt"))
    for said in said_by_ranks(3, RANK, tmp_path, url):
        assert "told: rank 1: CorruptError: chunk" in said, said
