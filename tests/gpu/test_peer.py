"""Captures into another GPU's memory: bit for bit, whoever dies. Two GPUs that reach each other."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zerostall
from gpu.test_cuda_capture import POLICIES, assert_same, clones, step, tensors, training
from hand import agent_pid, agent_report, kill_agent, wait_until
from zerostall import config
from zerostall.errors import ZerostallError
from zerostall.native.topology import topology

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2 or not topology()[1]:
        pytest.skip("two GPUs that reach each other's memory are needed")


def vault_pid() -> int:
    agent = agent_pid(config.runtime_dir())
    (pid,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(pid)


def until_stowed(ckpt: zerostall.Checkpointer, go: Callable[[], None], number: int) -> int:
    """Save until one went through a vault; the next step's number."""
    before = ckpt.stats.stowed
    deadline = time.monotonic() + 90
    while ckpt.stats.stowed == before:
        assert time.monotonic() < deadline, "nothing was stowed"
        go()
        with contextlib.suppress(ZerostallError):  # of a vault that has just died
            ckpt.save(number, when_busy="wait").wait("host")
        number += 1
    return number


@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_still_queued_count_and_later_ones_do_not(tmp_path: Path, policy: config.Policy) -> None:
    model, optimizer = training()
    with zerostall.Checkpointer(
        tmp_path, policy=policy, keep=9, when_busy="wait", peer=True, source_checks=1.0, model=model,
        optimizer=optimizer,
    ) as ckpt:  # fmt: skip
        first = until_stowed(ckpt, lambda: step(model, optimizer), 1)
        before = ckpt.stats.stowed
        kept = {}
        for number in range(first, first + 4):
            step(model, optimizer)
            torch.cuda._sleep(200_000_000)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(number)  # waits behind the sleep when save is called
            kept[number] = clones(model, optimizer)
            ckpt.save(number)
            for buffer in model.buffers():
                buffer.zero_()
            step(model, optimizer)
        for number, expected in kept.items():
            assert ckpt.restore(number) == number
            assert_same(tensors(model, optimizer), expected)
        assert ckpt.stats.stowed == before + 4
        assert not ckpt.stats.dirty


def test_training_goes_on_when_the_vault_is_killed(tmp_path: Path) -> None:
    model, optimizer = training(width=4096)
    with zerostall.Checkpointer(
        tmp_path, when_busy="wait", keep=9, peer=True, model=model, optimizer=optimizer
    ) as ckpt:
        number = until_stowed(ckpt, lambda: step(model, optimizer), 1)
        for _ in range(3):
            saving = ckpt.save(number)
            number += 1
            step(model, optimizer)  # the guard waits for copies into memory whose owner dies now
            os.kill(vault_pid(), signal.SIGKILL)
            step(model, optimizer)
            torch.cuda.synchronize()
            with contextlib.suppress(ZerostallError):  # dirty, unless it was drained by then
                saving.wait("host", timeout=60)
            number = until_stowed(ckpt, lambda: step(model, optimizer), number)
        expected = clones(model, optimizer)
        ckpt.save(number).wait("host")
        step(model, optimizer)
        assert ckpt.restore() == number
        assert_same(tensors(model, optimizer), expected)


def test_training_goes_on_when_the_agent_is_killed(tmp_path: Path) -> None:
    model, optimizer = training()
    with zerostall.Checkpointer(
        tmp_path, when_busy="wait", keep=9, peer=True, model=model, optimizer=optimizer
    ) as ckpt:
        number = until_stowed(ckpt, lambda: step(model, optimizer), 1)
        pid = vault_pid()
        kill_agent(config.runtime_dir())
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        number = until_stowed(ckpt, lambda: step(model, optimizer), number)
        expected = clones(model, optimizer)
        ckpt.save(number).wait("host")
        step(model, optimizer)
        assert ckpt.restore() == number
        assert_same(tensors(model, optimizer), expected)


TRAINER = """
import os, signal, sys, torch, zerostall
from gpu.test_cuda_capture import clones, step, training
model, optimizer = training()
ckpt = zerostall.Checkpointer(sys.argv[1], when_busy="wait", keep=9, peer=True, model=model, optimizer=optimizer)
number = 0
while ckpt.stats.stowed == 0:
    step(model, optimizer)
    ckpt.save(number := number + 1).wait("host")
step(model, optimizer)
expected = clones(model, optimizer)
torch.save(expected, sys.argv[2])
before = ckpt.stats.stowed
ckpt.save(number := number + 1)
optimizer.zero_grad()
while ckpt.stats.stowed == before:
    pass
print(number, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_lies_in_the_vault_when_the_trainer_is_killed_is_finished(tmp_path: Path) -> None:
    search = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search)}
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(tmp_path / "run"), str(tmp_path / "expected")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr
    number = int(json.loads(done.stdout.split()[-1]))
    model, optimizer = training()
    with zerostall.Checkpointer(tmp_path / "run", peer=True, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.restore() == number
        expected = torch.load(tmp_path / "expected", map_location="cuda")
        assert_same(tensors(model, optimizer), expected)
        assert ckpt.stats.restored_from == "peer"


def test_a_restore_comes_from_the_vault_and_from_host_memory_where_that_is_spoilt(tmp_path: Path) -> None:
    model, optimizer = training(width=4096)
    with zerostall.Checkpointer(
        tmp_path, when_busy="wait", keep=9, peer=True, model=model, optimizer=optimizer
    ) as ckpt:
        number = until_stowed(ckpt, lambda: step(model, optimizer), 1)
        expected = clones(model, optimizer)
        ckpt.save(number).wait("host")
        for tier in ("peer", "host"):
            step(model, optimizer)
            start = time.perf_counter()
            assert ckpt.restore(number) == number
            torch.cuda.synchronize()
            print(f"restored from {tier} in {time.perf_counter() - start:.3f} s")
            assert_same(tensors(model, optimizer), expected)
            assert ckpt.stats.restored_from == tier
            spoil(ckpt)


def test_a_mirror_serves_when_the_first_copy_is_spoilt_and_when_its_vault_is_killed(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 3:
        pytest.skip("three GPUs are needed")
    model, optimizer = training(width=4096)
    with zerostall.Checkpointer(
        tmp_path, when_busy="wait", keep=9, peer=zerostall.Peer(copies=2), model=model, optimizer=optimizer
    ) as ckpt:
        number = until_stowed(ckpt, lambda: step(model, optimizer), 1)
        wait_until(lambda: len(vault_pids()) == 2)
        wait_until(lambda: " mirrored in " in peer_tier())
        for killed in (False, True):
            for _ in range(3):  # the mirror may have come after the place was granted
                step(model, optimizer)
                expected = clones(model, optimizer)
                ckpt.save(number := number + 1).wait("host")
            wait_until(lambda: ", 2 mirrored in " in peer_tier())
            start = time.perf_counter()
            if killed:
                os.kill(vault_pids()[0], signal.SIGKILL)
            else:
                spoil(ckpt)
            step(model, optimizer)
            assert ckpt.restore(number) == number
            torch.cuda.synchronize()
            print(f"restored from the mirror in {time.perf_counter() - start:.3f} s, first vault killed: {killed}")
            assert_same(tensors(model, optimizer), expected)
            assert ckpt.stats.restored_from == "peer"


def vault_pids() -> list[int]:
    """In the order of their GPUs; the trainer's is the first of all."""
    agent = agent_pid(config.runtime_dir())
    ordinals = {uuid: facts.ordinal for uuid, facts in topology()[0].items()}
    found = {}
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        found[ordinals[words[words.index("--gpu") + 1]]] = int(pid)
    return [found[ordinal] for ordinal in sorted(found)]


def peer_tier() -> str:
    (rank,) = agent_report(config.runtime_dir()).ranks
    return next((tier.where for tier in rank.tiers if tier.tier == "peer"), "")


def spoil(ckpt: zerostall.Checkpointer) -> None:
    """All that lies in its locker is other bytes from now on."""
    opened, locker = ckpt._lockers._opened, ckpt._lockers._locker
    assert opened is not None and locker is not None
    other = torch.full((locker.places * locker.stride,), 0xEE, dtype=torch.uint8, device="cuda")
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoD_v2
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t]
    torch.cuda.synchronize()
    assert copy(opened[1].address, other.data_ptr(), other.nbytes) == 0
    torch.cuda.synchronize()


def test_no_memory_is_lost_over_many_saves(tmp_path: Path) -> None:
    model, optimizer = training(width=1024, layers=3)
    with zerostall.Checkpointer(tmp_path, when_busy="wait", peer=True, model=model, optimizer=optimizer) as ckpt:
        until_stowed(ckpt, lambda: step(model, optimizer), 1)
        free = []
        for number in range(100, 160):
            step(model, optimizer)
            ckpt.save(number)
            if number in (120, 159):
                torch.cuda.synchronize()
                free.append([torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)])
        assert all(after >= before for before, after in zip(*free, strict=True))
