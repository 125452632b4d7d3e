"""`restore(only=...)`: a part of what is stored is read without the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import zerostall
from conftest import stop_agent
from hand import close_all, visit
from zerostall.errors import CorruptError, MismatchError
from zerostall.wire.channel import peer


def bytes_read(agent: Path) -> int:
    """What the agent and this process have read of files until now, by the kernel's count."""
    processes = ["self"]
    if (channel := visit(agent)) is not None:
        processes.append(str(peer(channel.socket)[0]))
        close_all()
    return sum(int(re.findall(r"rchar: (\d+)", Path(f"/proc/{one}/io").read_text())[0]) for one in processes)


def test_only_the_chunks_that_hold_it_are_read_and_checked(tmp_path: Path, own_agent: Path) -> None:
    where = tmp_path / "run"
    large, small = torch.arange(24_000_000.0), torch.arange(1000.0, dtype=torch.float16)  # 96 MB: six chunks
    with zerostall.Checkpointer(where, rng=False, a={"large": large}, b={"small": small, "n": 3}) as ckpt:
        ckpt.save(1).wait()
    stop_agent(own_agent)
    image = where / "step-000000000001" / "rank-00000.safetensors"
    found = {"large": torch.zeros_like(large)}
    part = {"small": torch.zeros_like(small), "n": 0}
    ckpt = zerostall.Checkpointer(where, rng=False, a=found, b=part)
    before = bytes_read(own_agent)
    assert ckpt.restore(only="b.*") == 1
    assert bytes_read(own_agent) - before < image.stat().st_size / 3
    assert torch.equal(part["small"], small) and part["n"] == 3 and not found["large"].any()
    # Elsewhere there may be damage; what is asked for must be whole.
    data = bytearray(image.read_bytes())
    data[50_000_000] ^= 1
    image.write_bytes(data)
    assert ckpt.restore(only="b.small") == 1
    with pytest.raises(CorruptError, match="checksum") as caught:
        ckpt.restore(only="a.large")
    assert "overwritten part of this state" in caught.value.hint
    assert torch.equal(part["small"], small)
    ckpt.close()


def test_what_a_damaged_step_has_half_overwritten_is_not_left_so(tmp_path: Path, own_agent: Path) -> None:
    """The step before it has no tensor of that name, which strict=False lets pass: nobody would see what is in it."""
    where = tmp_path / "run"
    known, new = torch.ones(100), torch.full((12_000_000,), 7.0)  # 48 MB: three chunks
    with zerostall.Checkpointer(where, rng=False, s={"known": known}) as ckpt:
        ckpt.save(1).wait()
    with zerostall.Checkpointer(where, rng=False, s={"known": known, "new": new}) as ckpt:
        ckpt.restore(strict=False)
        ckpt.save(2).wait()
    stop_agent(own_agent)
    image = where / "step-000000000002" / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[40_000_000] ^= 1
    image.write_bytes(data)
    target = {"known": torch.zeros(100), "new": torch.zeros(12_000_000)}
    with zerostall.Checkpointer(where, rng=False, s=target) as ckpt:
        for only in (None, "s.*"):
            with pytest.raises(MismatchError, match=r"s\.new\n.*damaged has overwritten part of this") as caught:
                ckpt.restore(strict=False, only=only)
            assert caught.value.missing == ("s.new",)
        # Nor is a step that does not fit said to have left all as it was.
        with pytest.raises(MismatchError, match=r"s\.new(.|\n)*damaged has overwritten part of this"):
            ckpt.restore()
        target["new"].zero_()
        assert ckpt.restore(step=1, strict=False) == 1
        assert torch.equal(target["known"], known) and not target["new"].any()
