"""A bucket of each test's own, and a way to it that breaks things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stores.proxy import Proxy
from stores.seaweed import Seaweed
from stores.server import Server


@pytest.fixture
def proxy(s3_server: Server) -> Iterator[Proxy]:
    with Proxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server: Server) -> str:
    return s3_server.new_bucket()


@pytest.fixture
def s3_server(request: pytest.FixtureRequest, s3_server: Server) -> Server | Seaweed:
    """moto's, or the one that a test asks for, too, by `seaweed.on_both`."""
    return request.getfixturevalue("seaweed") if getattr(request, "param", "") == "seaweed" else s3_server
