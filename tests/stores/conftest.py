"""A bucket of each test's own, and a way to it that breaks things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from images import HandMade
from stores.azure import Azurite
from stores.google import Google
from stores.proxy import Proxy
from stores.runs import THREE_PARTS
from stores.seaweed import Seaweed
from stores.server import Server
from zerostall.tiers.remote import RemoteTier
from zerostall.tiers.store import Store


@pytest.fixture
def proxy(s3_server: Server) -> Iterator[Proxy]:
    with Proxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server: Server) -> str:
    return s3_server.new_bucket()


@pytest.fixture
def s3_server(request: pytest.FixtureRequest, s3_server: Server) -> Server | Seaweed | Azurite | Google:
    """moto's, or the one that a test asks for, too, by `seaweed.on_both` or `on_all`."""
    asked = getattr(request, "param", "moto")
    return s3_server if asked == "moto" else request.getfixturevalue(asked)


@pytest.fixture(scope="module")
def large() -> HandMade:
    return HandMade(THREE_PARTS, 7)


@pytest.fixture
def open_tier(s3_server: Server, proxy: Proxy, bucket: str) -> Iterator[Callable[..., RemoteTier]]:
    """Opens the run in the bucket as one more process would."""
    pools: list[ThreadPoolExecutor] = []
    tiers: list[RemoteTier] = []

    def open_tier(timeout: float = 20.0, **environment: str) -> RemoteTier:
        pools.append(ThreadPoolExecutor(4))
        store = Store(
            f"{s3_server.scheme}://{bucket}/run", s3_server.environment(proxy.url) | environment, timeout=timeout
        )
        tiers.append(RemoteTier(store, pools[-1]))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()
    for pool in pools:
        pool.shutdown()
