"""Snapshots of state on a CUDA device, bit for bit, whatever training does right after `save`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostall
from zerostall.config import Policy
from zerostall.errors import CapabilityError, TornError

pytestmark = pytest.mark.gpu

POLICIES: list[Policy] = ["overlap", "freeze"]
LONG = 200_000_000  # clock cycles: about 0.1 s


def training(width: int = 2048, layers: int = 6, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    stack = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*stack).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, **options)  # pyright: ignore
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    width = model[0][0].in_features  # type: ignore[index]
    model(torch.randn(64, width, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = value
    return found


def clones(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies as work of the current stream; nothing waits."""
    return {name: tensor.detach().clone() for name, tensor in tensors(model, optimizer).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.cuda.synchronize()
    different = [
        name
        for name, tensor in expected.items()
        if not torch.equal(tensor.contiguous().view(-1).view(torch.uint8),
                           found[name].detach().contiguous().view(-1).view(torch.uint8))
    ]  # fmt: skip
    assert not different


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    yield request.param
    torch.cuda.synchronize()


def test_kernels_still_queued_count_and_later_ones_do_not(tmp_path: Path, policy: Policy) -> None:
    model, optimizer = training()
    with zerostall.Checkpointer(
        tmp_path, policy=policy, keep=9, when_busy="wait", model=model, optimizer=optimizer
    ) as ckpt:
        kept = {}
        for number in range(1, 5):
            step(model, optimizer)
            torch.cuda._sleep(LONG)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(number)  # waits behind the sleep when save is called
            kept[number] = clones(model, optimizer)
            ckpt.save(number)
            for buffer in model.buffers():
                buffer.zero_()
            step(model, optimizer)
        assert not ckpt.stats.dirty
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        for number, expected in kept.items():
            assert ckpt.restore(number) == number
            assert_same(tensors(model, optimizer), expected)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_a_guard_right_after_save_does_not_hold_the_cpu_up(tmp_path: Path, policy: Policy) -> None:
    model, optimizer = training(width=8192, layers=4)  # 3.2 GB: the drain takes 60 ms
    with zerostall.Checkpointer(
        tmp_path, policy=policy, freeze_bytes=4 << 30, model=model, optimizer=optimizer, when_busy="wait"
    ) as ckpt:
        for number in range(1, 5):
            torch.cuda.synchronize()
            expected = clones(model, optimizer)
            saving = ckpt.save(number)
            optimizer.zero_grad()
            with ckpt.guard():
                torch._foreach_add_([p.data for p in model.parameters()], 1.0)
            saving.wait("host")
        assert sorted(ckpt.stats.guard_seconds)[1] < 0.01
        assert ckpt.restore(4) == 4
        assert_same(tensors(model, optimizer), expected)


def test_memory_left_right_after_save_is_not_lent_anew(tmp_path: Path, policy: Policy) -> None:
    model, optimizer = training()
    with zerostall.Checkpointer(tmp_path, policy=policy, model=model, optimizer=optimizer) as ckpt:
        ckpt.save(1).wait("host")
        expected = clones(model, optimizer)
        torch.cuda.synchronize()
        saving = ckpt.save(2)
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 7.0)
        litter = [torch.full((2048, 2048), 9.0, device="cuda") for _ in range(40)]
        saving.wait("host")
        del litter
        assert ckpt.restore(2) == 2
        assert_same(tensors(model, optimizer), expected)
        before = torch.cuda.memory_allocated()
        ckpt.save(3).wait("host")
        assert torch.cuda.memory_allocated() <= before


def test_another_stream_than_the_default_one(tmp_path: Path, policy: Policy) -> None:
    model, optimizer = training()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with (
        torch.cuda.stream(side),
        zerostall.Checkpointer(tmp_path, policy=policy, model=model, optimizer=optimizer) as ckpt,
    ):
        torch.cuda._sleep(LONG)
        step(model, optimizer)
        expected = clones(model, optimizer)
        ckpt.save(1)
        step(model, optimizer)
        assert ckpt.restore(1) == 1
        assert_same(tensors(model, optimizer), expected)


def test_strided_tensors_and_odd_sizes(tmp_path: Path, policy: Policy) -> None:
    torch.manual_seed(1)
    state = {
        "channels_last": torch.randn(8, 16, 9, 9, device="cuda").to(memory_format=torch.channels_last),
        "transposed": torch.randn(301, 77, device="cuda").t(),
        "bf16": torch.randn(12345, device="cuda").bfloat16(),
        "byte": torch.randint(0, 255, (7,), device="cuda", dtype=torch.uint8),
        "scalar": torch.tensor(3.5, device="cuda", dtype=torch.float64),
        "empty": torch.empty(0, 3, device="cuda"),
        "expanded": torch.randn(5, 1, device="cuda").expand(5, 6),
        "host": torch.randn(1000),
        "fp8": torch.randn(1001, device="cuda").to(torch.float8_e4m3fn),
    }
    with zerostall.Checkpointer(tmp_path, policy=policy, state=state) as ckpt:
        torch.cuda._sleep(LONG)
        expected = {name: tensor.clone() for name, tensor in state.items()}
        ckpt.save(1)
        for name, tensor in state.items():
            (tensor[:, :1] if name == "expanded" else tensor).view(
                torch.uint8 if name == "fp8" else tensor.dtype
            ).zero_()
        assert ckpt.restore(1) == 1
        assert_same(state, expected)
        assert state["channels_last"].is_contiguous(memory_format=torch.channels_last)


def test_a_change_behind_the_guard_is_found(tmp_path: Path) -> None:
    model, optimizer = training()
    with zerostall.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        saving = ckpt.save(1)
        with torch.no_grad():
            next(model.parameters()).add_(1)
        with pytest.raises(TornError, match=r"model\.0\.0\.weight"):
            saving.wait("host")
        ckpt.save(2, when_busy="wait").wait("host")


def test_without_the_order_the_snapshot_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSTALL_WITHOUT", "order")
    model, optimizer = training()
    with zerostall.Checkpointer(tmp_path, source_checks=0, model=model, optimizer=optimizer) as ckpt:
        ckpt.save(1).wait("host")
        before = clones(model, optimizer)  # memory that is taken behind the long kernel might wait for it
        torch.cuda._sleep(20 * LONG)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        ckpt.save(2).wait("host")
        torch.cuda.synchronize()  # a restore would come before what is queued, too
        ckpt.restore(2)
        # What is copied within the device first is another matter: nothing says what the copy finds there.
        large = {name: tensor for name, tensor in before.items() if tensor.ndim == 2}
        assert_same(tensors(model, optimizer), large)


def test_a_graph_being_captured_is_refused(tmp_path: Path) -> None:
    model, optimizer = training(capturable=True)
    with zerostall.Checkpointer(tmp_path, rng=False, model=model, optimizer=optimizer) as ckpt:
        ckpt.save(1).wait("host")
        graph = torch.cuda.CUDAGraph()
        scratch = torch.zeros(8, device="cuda")
        with torch.cuda.graph(graph):
            scratch.add_(1)
            with pytest.raises(CapabilityError, match="CUDA graph"):
                ckpt.save(2)
        ckpt.save(3).wait("host")


def test_state_of_both_kinds_of_memory(tmp_path: Path, policy: Policy) -> None:
    torch.manual_seed(2)
    host = nn.Linear(3000, 3000)
    card = nn.Linear(3000, 3000).cuda()
    one = torch.optim.AdamW(host.parameters())
    two = torch.optim.AdamW(card.parameters())
    state = {"host": host, "card": card, "one": one, "two": two}
    with zerostall.Checkpointer(tmp_path, policy=policy, **state) as ckpt:

        def go() -> None:
            host(torch.randn(4, 3000)).sum().backward()
            card(torch.randn(4, 3000, device="cuda")).sum().backward()
            one.step(), two.step()

        go()
        expected = {**clones(host, one), **{"card." + name: t for name, t in clones(card, two).items()}}
        ckpt.save(1)
        go()
        assert ckpt.restore(1) == 1
        assert_same({**tensors(host, one), **{"card." + n: t for n, t in tensors(card, two).items()}}, expected)


def test_no_memory_is_lost_over_many_saves(tmp_path: Path, policy: Policy) -> None:
    model, optimizer = training(width=1024, layers=3)
    with zerostall.Checkpointer(tmp_path, policy=policy, model=model, optimizer=optimizer) as ckpt:
        free = []
        for number in range(1, 61):
            step(model, optimizer)
            ckpt.save(number)
            if number in (20, 60):
                torch.cuda.synchronize()
                free.append(torch.cuda.mem_get_info()[0])
        assert free[1] >= free[0]


@pytest.mark.timeout(400)
def test_expandable_segments(tmp_path: Path) -> None:
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        pytest.skip("this is that process")
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    chosen = "queued or left or hold or strided"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout[-5000:]
