"""Restores from a store: chunks go to their tensors as they come, whatever the store does meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import zerostall
from conftest import stop_agent
from hand import close_all, kill_agent
from images import CHUNK, manifest_of
from stores.proxy import Proxy, Request
from stores.server import Server
from zerostall import native
from zerostall.errors import CorruptError
from zerostall.tiers.contract import Image
from zerostall.tiers.remote import RemoteTier
from zerostall.tiers.store import Store

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

    def right(self, value: int, step: int = 0) -> bool:
        same = torch.equal(self.state["w"], weight(value)) and bool((self.state["b"] == value).all())
        return same and (self.step, self.tier) == (step or value, "remote")


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


def test_aliases_that_are_apart_are_filled_from_the_chunks_that_they_lie_in(
    s3_server: Server, proxy: Proxy, own_agent: Path
) -> None:
    """Read from all over the image, of which no more is in memory at once than the places hold."""
    url = f"s3://{s3_server.new_bucket()}/run"
    one = torch.arange(4.0 * 3_000_000).view(3_000_000, 4)  # 48 MB: three chunks
    saved = {"a": one, "column": one[:, 1], "turned": one.T[2:], "same": one[10:20]}
    with zerostall.Checkpointer(url, rng=False, s=saved) as ckpt:
        ckpt.save(1).wait("remote", timeout=60)
    stop_agent(own_agent)
    apart = {name: torch.zeros(tensor.shape) for name, tensor in saved.items()}
    apart["same"] = apart["column"][:40].view(10, 4)  # memory of two: what was stored as a view is told to differ
    with zerostall.Checkpointer(url, rng=False, s=apart) as ckpt:
        assert ckpt.restore() == 1 and ckpt.stats.restored_from == "remote"
    assert proxy.count(of_step(1)) == CHUNKS
    for name in ("a", "turned"):
        assert torch.equal(apart[name], saved[name])
    assert torch.equal(apart["column"][40:], saved["column"][40:])
    assert torch.equal(apart["same"], saved["same"])


@pytest.mark.parametrize("wrong", [False, True])
def test_chunks_of_another_writer_may_be_larger(
    s3_server: Server, bucket_with_steps: str, proxy: Proxy, wrong: bool
) -> None:
    """As large as the format lets them be; they are read by requests of the usual size."""
    with ThreadPoolExecutor(4) as hands:
        tier = RemoteTier(Store(f"s3://{bucket_with_steps}/run", s3_server.environment()), hands)
        here = tier.open(2, 0)
        data = bytearray(here.record.nbytes)
        image = tier.bytes_of(2, 0, here)
        image.read_into(memoryview(data), 0)
        image.close()
        size = CHUNK + (8 << 20)
        sums = [native.crc32c(data[at : at + size]) for at in range(0, len(data), size)]
        other = msgspec.structs.replace(here.record, step=3, created=here.record.created + 1)
        other = msgspec.structs.replace(other, chunk_bytes=size, checksums=sums)
        held = np.frombuffer(data, dtype=np.uint8)
        tier.put(Image(here.layout, other, held.ctypes.data))
        tier.commit(manifest_of(other))
        if wrong:
            proxy.rule("flip", lambda r: of_step(3)(r) and chunk_of(r) == 1, times=100)
        try:
            assert Restored(bucket_with_steps).right(2, step=2 if wrong else 3)
        finally:
            tier.evict(3)
            tier.close()
    asked = [
        request for request in proxy.requests if "step-000000000003" in request.target and "range" in request.headers
    ]
    lengths = [int(b) - int(a) + 1 for a, b in (re.findall(r"\d+", one.headers["range"]) for one in asked)]
    assert max(lengths) == CHUNK and (wrong or sum(lengths) == len(data))
