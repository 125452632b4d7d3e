"""What arrives is what the device held at save: looked at by the device itself, chunk by chunk."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostall
from gpu.test_cuda_capture import LONG, assert_same, clones, step, tensors, training
from zerostall import native, optim
from zerostall.config import Policy
from zerostall.core.layout import CHUNK
from zerostall.errors import GhostError

pytestmark = pytest.mark.gpu

POLICIES: list[Policy] = ["overlap", "freeze", "flip"]


def chunks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """At least so many chunks of an image are on the device."""
    return sum(tensor.nbytes for tensor in tensors(model, optimizer).values()) // CHUNK


def test_the_device_finds_the_checksums_of_the_cpu() -> None:
    device = native.Device(0)
    memory = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8, device="cuda")
    on_host = memory.cpu()
    generator = random.Random(2)
    runs = [(0, memory.numel()), (1, memory.numel() - 2), (5, 0), (7, 1)]
    for most in (200, 5000, 300_000, 8 << 20):
        runs += [(generator.randrange(1 << 20), generator.randrange(most)) for _ in range(50)]
    stream = torch.cuda.current_stream().cuda_stream
    for span_bytes in (0, 4096, 64 << 10):
        at, host = memory.data_ptr(), on_host.data_ptr()
        probe = native.Probe(device, [(at + begin, nbytes) for begin, nbytes in runs], span_bytes=span_bytes)
        probe.launch(stream)
        probe.fetch(stream)
        assert probe.checksums() == [native.crc32c_memory(host + begin, nbytes) for begin, nbytes in runs]
    device.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_all_of_a_model_whatever_training_does_next(tmp_path: Path, policy: Policy) -> None:
    model, optimizer = training(width=4096, layers=4)
    if policy == "flip":
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        step(model, optimizer)
    with zerostall.Checkpointer(
        tmp_path, policy=policy, freeze_bytes=2 << 30, keep=9, when_busy="wait", source_checks=1,
        model=model, optimizer=optimizer,
    ) as ckpt:  # fmt: skip
        kept = {}
        for number in range(1, 5):
            step(model, optimizer)
            torch.cuda._sleep(LONG)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(number)  # still queued at save
            kept[number] = clones(model, optimizer)
            ckpt.save(number)
            for buffer in model.buffers():
                buffer.zero_()
            step(model, optimizer)  # changes everything
        assert ckpt.stats.dirty == 0
        for number, expected in kept.items():
            assert ckpt.restore(number) == number
            assert_same(tensors(model, optimizer), expected)
        assert ckpt.stats.chunks_compared >= 4 * chunks_of(model, optimizer)


def test_memory_freed_right_after_save(tmp_path: Path) -> None:
    model, optimizer = training(width=4096, layers=4)
    with zerostall.Checkpointer(tmp_path, source_checks=1, model=model, optimizer=optimizer) as ckpt:
        for number in range(1, 4):
            torch.cuda._sleep(LONG // 4)
            step(model, optimizer)
            expected = clones(model, optimizer)
            saving = ckpt.save(number)
            for parameter in model.parameters():
                parameter.data = torch.full_like(parameter, 7.0)
            litter = [torch.full((4096, 4096), 9.0, device="cuda") for _ in range(10)]
            saving.wait("host")
            del litter
            assert ckpt.restore(number) == number
            assert_same(tensors(model, optimizer), expected)
        assert ckpt.stats.dirty == 0 and ckpt.stats.chunks_compared >= 3 * chunks_of(model, optimizer)


def test_several_streams_in_order(tmp_path: Path) -> None:
    model, optimizer = training()
    sides = [torch.cuda.Stream() for _ in range(3)]
    expected = clones(model, optimizer)
    with zerostall.Checkpointer(tmp_path, source_checks=1, when_busy="wait", model=model, optimizer=optimizer) as ckpt:
        for number in range(1, 5):
            step(model, optimizer)
            for side in sides:
                side.wait_stream(torch.cuda.current_stream())
            for k, parameter in enumerate(model.parameters()):
                with torch.cuda.stream(sides[k % 3]), torch.no_grad():
                    torch.cuda._sleep(LONG // 20)
                    parameter.mul_(1.5)
            for side in sides:
                torch.cuda.current_stream().wait_stream(side)
            expected = clones(model, optimizer)
            saving = ckpt.save(number)
            step(model, optimizer)
            saving.wait("host")
        assert ckpt.restore(4) == 4
        assert_same(tensors(model, optimizer), expected)


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_without_the_order_it_is_caught_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setenv("ZEROSTALL_WITHOUT", "order")
    model, optimizer = training()
    with zerostall.Checkpointer(tmp_path, source_checks=share, model=model, optimizer=optimizer) as ckpt:
        torch.cuda.synchronize()
        with contextlib.suppress(GhostError):  # small tensors are copied within the device first: who is first there?
            ckpt.save(1).wait("host")  # what starts up waits for the device
        dirty = ckpt.stats.dirty
        torch.cuda._sleep(20 * LONG)
        with torch.no_grad():
            for tensor in tensors(model, optimizer).values():
                tensor.add_(1)
        saving = ckpt.save(2)
        with pytest.raises(GhostError, match=r"step 2: other bytes arrived .*: (model|optimizer)\."):
            saving.wait("host")
        assert ckpt.stats.dirty == dirty + 1


def test_a_write_past_version_counters_is_caught_and_named(tmp_path: Path) -> None:
    model, optimizer = training(width=8192, layers=4)  # 3.2 GB: the drain takes 60 ms
    with zerostall.Checkpointer(tmp_path, source_checks=1, model=model, optimizer=optimizer) as ckpt:
        ckpt.save(1).wait("host")
        torch.cuda.synchronize()
        saving = ckpt.save(2)
        torch.cuda._sleep(LONG // 10)  # by then the device has looked, and the copies have not come to the end
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg_sq"].data.add_(1)
        with pytest.raises(GhostError, match="exp_avg_sq"):
            saving.wait("host")


def test_no_memory_is_lost(tmp_path: Path) -> None:
    model, optimizer = training(width=2048, layers=6)
    free = []
    with zerostall.Checkpointer(
        tmp_path, source_checks=0.3, keep=1, when_busy="wait", model=model, optimizer=optimizer
    ) as ckpt:
        for number in range(1, 41):
            step(model, optimizer)
            ckpt.save(number).wait("host")
            if number in (10, 40):
                torch.cuda.synchronize()
                free.append(torch.cuda.mem_get_info()[0])
        assert ckpt.stats.dirty == 0 and ckpt.stats.chunks_compared > 0
    assert free[1] >= free[0]
