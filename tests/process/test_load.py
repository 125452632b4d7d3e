"""`zerostall.load`: parts of a step, other people's files, on several ranks that read each byte once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerostall
from ranks.scripts import said_by_ranks
from zerostall.errors import CorruptError
from zerostall.trainer.exchange.filling import new_bytes

pytestmark = pytest.mark.usefixtures("own_agent")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def tensors() -> dict[str, torch.Tensor]:
    """Of every size class: none, tiny, odd, larger than a block, larger than a chunk."""
    made = torch.Generator().manual_seed(3)
    return {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "byte": torch.ones(1, dtype=torch.uint8),
        "odd": torch.randn(77, 13, generator=made).to(torch.bfloat16),
        "large": torch.randn(3, 1 << 20, generator=made),
        "larger": torch.randn(5 << 20, generator=made),
        "last": torch.arange(9),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    where = tmp_path / "run"
    state = {"base": tensors(), "tuned": {"a": torch.arange(5), "b": np.arange(6.0)}, "net": nn.Linear(3, 4)}
    with zerostall.Checkpointer(where, **state) as ckpt:
        ckpt.save(7).wait("disk", timeout=120)
    return where


@pytest.mark.parametrize("nbytes", [0, 5, 4 << 20, (6 << 20) + 3, 32 << 20])
@pytest.mark.parametrize("offset", [0, 100, 4096 + 4095])
def test_new_memory_lies_within_its_page_as_in_the_file(nbytes: int, offset: int) -> None:
    made = new_bytes(nbytes, torch.device("cpu"), offset)
    assert made.numel() == made.untyped_storage().nbytes() == nbytes  # and no more, for whoever saves it
    assert nbytes < 4 << 20 or made.data_ptr() % 4096 == offset % 4096
    assert torch.equal(made.fill_(3), torch.full((nbytes,), 3, dtype=torch.uint8))


def test_a_part_of_a_step_reads_no_more_than_that(run: Path) -> None:
    expected = tensors()
    found = zerostall.load(run, 7)
    assert list(found) == ["base", "tuned", "net"] or set(found) == {"base", "tuned", "net"}
    assert {name: bits(tensor) for name, tensor in found["base"].items()} == {n: bits(t) for n, t in expected.items()}  # type: ignore[attr-defined]
    image = run / "step-000000000007" / "rank-00000.safetensors"
    with image.open("r+b") as file:  # damage in the middle of what is large
        file.seek(image.stat().st_size // 2)
        file.write(b"damage")
    with pytest.raises(CorruptError, match=r"rank-00000.safetensors: chunk \d of \d fails its checksum"):
        zerostall.load(run, 7)
    tuned = zerostall.load(run, 7, "tuned")["tuned"]
    assert torch.equal(tuned["a"], torch.arange(5)) and np.array_equal(tuned["b"], np.arange(6.0))  # type: ignore[index]
    assert list(zerostall.load(run, 7, "net.bias")["net"]) == ["bias"]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="step 7 holds nothing of that name"):
        zerostall.load(run, 7, ["tuned", "other"])


def test_tensors_have_memory_of_their_own(run: Path) -> None:
    base = zerostall.load(run, 7)["base"]
    assert base["scalar"].untyped_storage().nbytes() == 4  # type: ignore[index]


def test_a_safetensors_file(tmp_path: Path) -> None:
    path, expected = tmp_path / "model.safetensors", tensors()
    save_file(expected, path, {"format": "pt"})
    found = zerostall.load(path)
    assert list(map(bits, found.values())) == [bits(expected[name]) for name in found]  # type: ignore[arg-type]
    assert set(zerostall.load(path, only="la*")) == {"large", "larger", "last"}
    assert list(zerostall.load(tmp_path, only=["odd"])) == ["odd"]  # a folder with one file
    with pytest.raises(ValueError, match="holds nothing of that name"):
        zerostall.load(path, only="missing")
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        zerostall.load(path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A Hugging Face folder of three files."""
    folder, expected = tmp_path / "hub", tensors()
    folder.mkdir()
    names = list(expected)
    weight_map = {name: f"model-{k % 3}.safetensors" for k, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: expected[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_a_hugging_face_folder(shards: Path) -> None:
    expected = tensors()
    for where in (shards, shards / "model.safetensors.index.json"):
        found = zerostall.load(where)
        assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in expected.items()}  # type: ignore[arg-type]


RANK = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
import zerostall
from zerostall.native import Load
rank, store, run, shards = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
import zerostall.trainer.exchange.filling as filling
mine, begin = [], filling._Reader.begin
def counted(self, share):
    mine.append(share.nbytes)
    begin(self, share)
filling._Reader.begin = counted
measured = []
for where, pass_on, size in [(run, True, 8 << 20), (shards, True, 8 << 20), (run, True, 1), (run, False, 1)]:
    def choose(*seen):
        measured.append(seen)
        return filling.passing.Way(pass_on, "as the test wants")
    filling.passing.choose, filling.ROUND = choose, size
    alone = zerostall.load(where)
    mine.clear()
    together = zerostall.load(where, process_group=dist.group.WORLD)
    flat = lambda found: [t for _, t in sorted((found.get("base") or found).items())]
    assert len(flat(alone)) == len(flat(together)) == 7
    for one, other in zip(flat(alone), flat(together)):
        assert torch.equal(one, other), (one, other)
    every = [None] * 3
    dist.all_gather_object(every, sum(mine))
    nbytes = sum(t.nbytes for t in flat(alone))
    if pass_on:
        assert nbytes <= sum(every) <= nbytes + 1000, (every, nbytes)  # what is small in the run stands beside it
        assert sum(map(bool, every)) > 1
    else:
        assert nbytes < sum(every) < 3 * nbytes + 3000, (every, nbytes)  # all but the first round thrice
assert len(measured) == 2 and all(ranks == 3 and min(rest) > 0 for ranks, *rest in measured), measured
dist.barrier()
if rank == 1:
    path = next(Path(run).glob("step-*/*.safetensors"))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damage")
dist.barrier()
try:
    zerostall.load(run, process_group=dist.group.WORLD)
except zerostall.errors.CorruptError as error:
    print("told:", error)
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_ranks_read_each_byte_once_and_hear_of_damage_together(run: Path, shards: Path, tmp_path: Path) -> None:
    for said in said_by_ranks(3, RANK, tmp_path, run, shards):
        assert "fails its checksum" in said and "told: rank " in said, said
