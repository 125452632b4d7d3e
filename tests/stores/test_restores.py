"""Restores from a store: chunks go to their tensors as they come, whatever the store does meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zerostall
from conftest import stop_agent
from hand import close_all, kill_agent
from images import CHUNK
from stores.proxy import Proxy, Request
from stores.server import Server
from zerostall.errors import CorruptError

CHUNKS = 3
ROWS, COLUMNS = 2000, 4200  # 33.6 MB: two chunks and a bit


def weight(step: int) -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).add_(step).view(ROWS, COLUMNS)


_made: dict[int, str] = {}


@pytest.fixture
def bucket_with_steps(s3_server: Server, forked_agents: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps 1 and 2 of a run, made once for all of these tests, which only read."""
    if s3_server.port in _made:
        return _made[s3_server.port]
    bucket, folder = s3_server.new_bucket(), tmp_path_factory.mktemp("agent")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**s3_server.environment(), "ZEROSTALL_RUNTIME_DIR": str(folder)}.items():
            patch.setenv(name, value)
        state = {"w": weight(0), "b": torch.zeros(10)}
        with zerostall.Checkpointer(f"s3://{bucket}/run", rng=False, s=state) as ckpt:
            for step in (1, 2):
                state["w"].copy_(weight(step))
                state["b"].fill_(step)
                ckpt.save(step).wait("remote", timeout=60)
        stop_agent(folder)
    return _made.setdefault(s3_server.port, bucket)


@pytest.fixture
def proxy(s3_server: Server, own_agent: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between the store and the agent of a test."""
    with Proxy(s3_server) as proxy:
        for name, value in s3_server.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy
    close_all()


def chunk_of(request: Request) -> int | None:
    """The chunk of an image that is asked for."""
    found = re.match(r"bytes=(\d+)-", request.headers.get("range", ""))
    return int(found[1]) // CHUNK if found and request.method == "GET" and ".safetensors" in request.target else None


def of_step(step: int, *chunks: int) -> Callable[[Request], bool]:
    return lambda request: f"step-{step:012d}" in request.target and chunk_of(request) in (chunks or range(CHUNKS))


class Restored:
    """What a run's state became."""

    def __init__(self, bucket: str) -> None:
        self.state = {"w": torch.zeros(ROWS, COLUMNS), "b": torch.zeros(10)}
        with zerostall.Checkpointer(f"s3://{bucket}/run", rng=False, s=self.state) as ckpt:
            self.step = ckpt.restore()
            self.tier = ckpt.stats.restored_from

    def right(self, step: int) -> bool:
        same = torch.equal(self.state["w"], weight(step)) and bool((self.state["b"] == step).all())
        return same and (self.step, self.tier) == (step, "remote")


def test_chunks_are_in_their_tensors_while_the_first_is_on_its_way(bucket_with_steps: str, proxy: Proxy) -> None:
    rule = proxy.rule("hold", of_step(2, 0))
    state = {"w": torch.zeros(ROWS, COLUMNS), "b": torch.zeros(10)}
    tail, expected = state["w"].flatten()[CHUNK // 4 :], weight(2).flatten()[CHUNK // 4 :]
    seen: list[bool] = []

    def watch() -> None:
        deadline = time.monotonic() + 50
        while not torch.equal(tail, expected) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(torch.equal(tail, expected) and not rule.released.is_set())
        rule.released.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with zerostall.Checkpointer(f"s3://{bucket_with_steps}/run", rng=False, s=state) as ckpt:
        assert ckpt.restore() == 2
    watcher.join(60)
    assert seen == [True]
    assert torch.equal(state["w"], weight(2))
    assert proxy.count(of_step(2)) == CHUNKS and proxy.count(of_step(1)) == 0


def test_no_more_is_asked_for_than_is_needed(bucket_with_steps: str, proxy: Proxy) -> None:
    state = {"w": torch.zeros(ROWS, COLUMNS), "b": torch.zeros(10)}
    with zerostall.Checkpointer(f"s3://{bucket_with_steps}/run", rng=False, s=state) as ckpt:
        assert ckpt.restore(only="s.b") == 2
    assert (state["b"] == 2).all() and not state["w"].any()
    assert proxy.count(of_step(2)) == 1


LONG = [pytest.param(do, marks=pytest.mark.long) for do in ("cut", "drop", "503 SlowDown", "stall")]


@pytest.mark.parametrize("do", ["flip", *LONG])
def test_what_breaks_on_the_way_comes_again(
    bucket_with_steps: str, proxy: Proxy, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if do == "stall":
        monkeypatch.setenv("ZEROSTALL_STORE_TIMEOUT", "5")
    proxy.rule(do, of_step(2, 0))
    proxy.rule(do, of_step(2, 2))
    assert Restored(bucket_with_steps).right(2)
    assert proxy.count(of_step(1)) == 0


@pytest.mark.parametrize("do", ["flip", pytest.param("404 NoSuchKey", marks=pytest.mark.long)])
def test_a_chunk_that_does_not_come_leaves_nothing_of_its_step(bucket_with_steps: str, proxy: Proxy, do: str) -> None:
    proxy.rule(do, of_step(2, CHUNKS - 1), times=1000)
    assert Restored(bucket_with_steps).right(1)


def test_where_no_step_is_whole_it_is_said_that_the_state_is_not(bucket_with_steps: str, proxy: Proxy) -> None:
    proxy.rule("flip", lambda request: chunk_of(request) == 1, times=1000)
    with pytest.raises(
        CorruptError, match=r"step 2 in remote: .*chunk 1 fails its checksum; step 1 in remote: "
    ) as told:
        Restored(bucket_with_steps)
    assert "make it anew before you train on it" in told.value.hint


def test_an_agent_that_dies_in_the_middle_is_replaced(bucket_with_steps: str, proxy: Proxy, own_agent: Path) -> None:
    rule = proxy.rule("hold", of_step(2, CHUNKS - 1))

    def kill() -> None:
        assert rule.reached.wait(50)
        kill_agent(own_agent)
        rule.released.set()

    killer = threading.Thread(target=kill)
    killer.start()
    assert Restored(bucket_with_steps).right(2)
    killer.join(60)
    assert rule.seen >= 2  # by the other agent, too


def test_what_is_looked_into_here_and_there_comes_through_the_same_places(
    s3_server: Server, own_agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor that is two in the target: it is read from all over the image."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.new_bucket()}/run"
    one = torch.arange(4_300_000.0)
    with zerostall.Checkpointer(url, rng=False, s={"a": one, "b": one[1000:2000]}) as ckpt:
        ckpt.save(1).wait("remote", timeout=60)
    stop_agent(own_agent)
    apart = {"a": torch.zeros_like(one), "b": torch.zeros(1000)}
    with zerostall.Checkpointer(url, rng=False, s=apart) as ckpt:
        assert ckpt.restore() == 1 and ckpt.stats.restored_from == "remote"
    assert torch.equal(apart["a"], one) and torch.equal(apart["b"], one[1000:2000])
