"""Ranks of one node restore from a store: what several want comes once for all of them, and none holds others up."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from conftest import stop_agent
from images import CHUNK
from ranks.world import Start
from stores.proxy import Proxy
from stores.server import Server


def chunks_read(proxy: Proxy) -> Counter[tuple[str, int]]:
    """How often each chunk of each image was asked for."""
    ranges = (
        (request.target, re.match(r"bytes=(\d+)-", request.headers.get("range", "")))
        for request in proxy.requests
        if request.method == "GET" and ".safetensors" in request.target
    )
    return Counter((target, int(found[1]) // CHUNK) for target, found in ranges if found)


def test_each_chunk_comes_once_and_damage_takes_all_to_the_step_before(
    start: Start, s3_server: Server, agent_environment: dict[str, str]
) -> None:
    bucket = s3_server.new_bucket()
    url = f"s3://{bucket}/run"
    with Proxy(s3_server) as proxy:
        for said in start(2, "from_store", url, 1, 2, environment=s3_server.environment(proxy.url)).wait():
            assert "restored 2 from remote" in said
        read = chunks_read(proxy)
    assert set(read.values()) == {1} and len(read) == 4  # two images of 30 MiB
    stop_agent(Path(agent_environment["ZEROSTALL_RUNTIME_DIR"]))
    # The last chunk of one rank's image: the other rank has no use for most of it, and waits for no memory of ours.
    (key,) = (key for key in s3_server.keys(bucket) if "000002" in key and re.search(r"rank-00001.*safetensors", key))
    data = bytearray(s3_server.object(bucket, key))
    data[-1] ^= 1
    s3_server.put(bucket, key, bytes(data))
    for said in start(2, "from_store", url, environment=s3_server.environment()).wait():
        assert "restored 1 from remote" in said and "step 2 in remote is skipped" in said


def test_columns_come_out_of_chunks_of_rows(start: Start, s3_server: Server, agent_environment: dict[str, str]) -> None:
    """No image is in memory whole for them, and each chunk of rows comes once for all who want columns of it."""
    url = f"s3://{s3_server.new_bucket()}/run"
    with Proxy(s3_server) as proxy:
        for said in start(2, "columns_from_store", url, environment=s3_server.environment(proxy.url)).wait():
            assert "restored 1 from remote" in said
        read = chunks_read(proxy)
    assert set(read.values()) == {1} and len(read) == 4
