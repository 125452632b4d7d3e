"""zerostall.optim.AdamW on a CUDA device: against torch's fused one, and with snapshots that are still being read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostall
from gpu.test_cuda_capture import assert_same, clones, tensors
from zerostall import optim

pytestmark = pytest.mark.gpu

SAME_OPERATIONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Before, torch's kernel computed with float64 scalars: the last bits differ."""
SHAPES = [(1000, 777), (4096,), (4097,), (3,), (), (0,), (2, 5, 3), (64, 3, 7, 7)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "lr": 0.02},
    {"weight_decay": 0.0, "betas": (0.5, 0.7), "eps": 1e-3},
    {"capturable": True},
]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for _ in range(steps):
        for parameter in trained:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    found = []
    for parameter in trained:
        found += [parameter.detach(), *(optimizer.state[parameter][key] for key in sorted(optimizer.state[parameter]))]
    return found


def ulps(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The worst difference, of elements no smaller than the mean."""
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one.numel() == 0:
            continue
        scale = other.double().abs().clamp(min=other.double().abs().mean().item() + 1e-30) * torch.finfo(one.dtype).eps
        worst = max(worst, ((one.double() - other.double()).abs() / scale).max().item())
    return worst


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_thousand_steps_give_what_torchs_fused_one_gives(
    options: dict[str, Any], dtype: torch.dtype, record_property: Any
) -> None:
    ours = train(optim.AdamW(parameters(dtype), **options), 1000)
    theirs = train(torch.optim.AdamW(parameters(dtype), fused=True, **options), 1000)
    worst = ulps(ours, theirs)
    record_property("ulps", worst)
    print(f"{dtype} {options}: {worst:.2f} ulp")
    assert worst <= (2 if SAME_OPERATIONS else 64)


def test_one_launch_for_a_group_and_no_upload_in_the_steady_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerostall.optim.kernels import adam

    launches: list[int] = []
    launch = adam.adam
    monkeypatch.setattr(adam, "adam", lambda table, *rest, **more: (launches.append(table.rows),
                                                                   launch(table, *rest, **more)))  # fmt: skip
    many = [nn.Parameter(torch.randn(100, device="cuda")) for _ in range(3000)]
    optimizer = optim.AdamW(many)
    for parameter in many:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    (batch,) = optimizer._rosters._rosters[0].batches
    uploads = batch.table.columns._version
    optimizer.step()
    assert launches == [3000, 3000]
    assert batch.table.columns._version == uploads


def test_a_scaler_and_an_overflow() -> None:
    for overflow in (False, True):
        results = []
        for kind in (optim.AdamW, torch.optim.AdamW):
            mine = parameters()
            optimizer = kind(mine, fused=True)
            scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
            for _ in range(3):
                scaler.scale(sum((p * p).sum() for p in mine)).backward()  # type: ignore[union-attr]
                if overflow and mine[0].grad is not None:
                    mine[0].grad[0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            results.append([p.detach() for p in mine])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}, {"dampening": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_thousand_steps_of_sgd(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = train(optim.SGD(parameters(dtype), momentum=0.9, **options), 1000)
    theirs = train(torch.optim.SGD(parameters(dtype), momentum=0.9, fused=True, **options), 1000)
    # torch rounds in another order; in float64, where every step does, by no more than one last place a step.
    assert ulps(ours, theirs) <= (1000 if dtype == torch.float64 else 64)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_thousand_steps_of_lion(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Beside torch's own operations; a sign that rounding alone decides moves an element by twice the rate.

    Decay shrinks by a factor that torch rounds to the tensor's type once for all steps: that much more may differ.
    """
    lr = 1e-4
    ours = train(optim.Lion(parameters(dtype), lr=lr, **options), 1000)
    theirs = train(optim.Lion(parameters(dtype), lr=lr, fused=False, **options), 1000)
    assert ulps(ours[1::2], theirs[1::2]) <= 64
    for one, other in zip(ours[::2], theirs[::2], strict=True):
        off = (one - other).abs() - 1000 * torch.finfo(dtype).eps / 2 * one.abs()
        assert int((off > lr / 2).sum()) <= 1 + one.numel() // 1000
        assert off.numel() == 0 or float(off.max()) < 100 * lr


def warmed_up(optimizer: optim.AdamW, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of the step, which has been taken once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("whole", [False, True])  # with forward and backward, whose gradients are then the graph's own
def test_a_graph_of_the_step_replays(whole: bool) -> None:
    mine, theirs = parameters(), parameters()
    graphed, plain = optim.AdamW(mine, capturable=True), optim.AdamW(theirs)

    def backward(trained: list[nn.Parameter]) -> None:
        sum((parameter * parameter).sum() for parameter in trained).backward()  # type: ignore[union-attr]

    def step() -> None:
        if whole:
            graphed.zero_grad()
            backward(mine)
        graphed.step()

    def plain_step(times: float = 1) -> None:
        if whole:
            plain.zero_grad()
            backward(theirs)
        for parameter in theirs:
            gradient = parameter.grad if whole else None
            parameter.grad = (torch.ones_like(parameter) if gradient is None else gradient) * times
        plain.step()

    for one in mine:
        one.grad = torch.ones_like(one)
    graph = warmed_up(graphed, step)
    plain_step()
    for _ in range(3):
        graph.replay()
        plain_step()
    for _ in range(3):  # a step outside of it has tables of its own
        kept = [parameter.grad for parameter in mine]
        if whole:
            graphed.zero_grad()
            backward(mine)
        for parameter in mine:
            gradient = parameter.grad if whole else None
            parameter.grad = (torch.ones_like(parameter) if gradient is None else gradient) * 2
        graphed.step()
        plain_step(2)
        for parameter, gradient in zip(mine, kept, strict=True):
            parameter.grad = gradient
        graph.replay()
        plain_step()
        assert_same(dict(enumerate(mine)), dict(enumerate(theirs)))  # type: ignore[arg-type]


def heavy(width: int = 8192, layers: int = 4) -> nn.Module:
    """3.2 GB with AdamW: reading it takes 60 ms, a step without forward and backward a few."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()


def fake_backward(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * (1 / number)


@pytest.mark.parametrize("key", ["model", "z_model"])  # before the moments in the image, and after them
def test_steps_do_not_wait_and_snapshots_are_exact(tmp_path: Path, key: str) -> None:
    model = heavy()
    optimizer = optim.AdamW(model.parameters())
    fake_backward(model, 1)
    optimizer.step()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    saved, flips, kept = {}, 0, 0
    with zerostall.Checkpointer(
        tmp_path, policy="flip", freeze_bytes=8 << 30, keep=2, when_busy="wait", optimizer=optimizer, **{key: model}
    ) as ckpt:
        for number in range(1, 9):
            fake_backward(model, number + 1)
            before = [optimizer.state[p]["exp_avg_sq"].data_ptr() for p in model.parameters()]
            expected = {name: tensor.cpu() for name, tensor in clones(model, optimizer).items()}
            saving = ckpt.save(number)
            optimizer.step()
            flips += before != [optimizer.state[p]["exp_avg_sq"].data_ptr() for p in model.parameters()]
            kept += len(optimizer._flips._spares) > 2 * len(before)
            for _ in range(3):
                optimizer.step()
            saving.wait("host")
            saved = {number - 1: saved.get(number - 1), number: expected}
        print(f"{flips} of 8 flipped, {kept} kept parameters; guard {ckpt.stats.guard_seconds}")
        assert flips >= 4 and ckpt.stats.dirty == 0
        for number, expected in saved.items():
            assert expected is not None and ckpt.restore(number) == number
            assert_same({name: tensor.cpu() for name, tensor in tensors(model, optimizer).items()}, expected)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_results_are_those_without_snapshots(tmp_path: Path) -> None:
    results = []
    for policy in (None, "flip", "auto"):
        model = heavy(4096, 6)
        optimizer = optim.AdamW(model.parameters())
        ckpt = policy and zerostall.Checkpointer(
            tmp_path / policy, policy=policy, freeze_bytes=4 << 30, keep=1, model=model, optimizer=optimizer
        )
        for number in range(1, 31):
            fake_backward(model, number)
            if ckpt:
                ckpt.save(number)
            optimizer.step()
        if ckpt:
            print(policy, ckpt.stats.policy, ckpt.stats.policy_reason)
            ckpt.close()
        results.append({name: tensor.cpu() for name, tensor in clones(model, optimizer).items()})
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_no_memory_is_lost(tmp_path: Path) -> None:
    model = heavy(2048, 6)
    optimizer = optim.AdamW(model.parameters())
    with zerostall.Checkpointer(tmp_path, policy="flip", keep=1, model=model, optimizer=optimizer) as ckpt:
        used = []
        for number in range(1, 61):
            fake_backward(model, number)
            saving = ckpt.save(number, when_busy="wait")
            optimizer.step()
            if number in (20, 60):
                saving.wait("host")  # until then parameters are kept aside
                torch.cuda.synchronize()
                used.append(torch.cuda.memory_allocated() - optimizer._flips.nbytes)
        assert used[1] <= used[0]
        # Which tensors were still to be read differs from save to save; each has one other memory at most.
        assert optimizer._flips.nbytes <= 3 * sum(parameter.nbytes for parameter in model.parameters())
    torch.cuda.synchronize()
    assert optimizer._flips.nbytes == 0
