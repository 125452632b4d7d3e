"""A bucket of each test's own, and a way to it that breaks things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stores.azure import Azurite
from stores.google import Google
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
def s3_server(request: pytest.FixtureRequest, s3_server: Server) -> Server | Seaweed | Azurite | Google:
    """moto's, or the one that a test asks for, too, by `seaweed.on_both` or `on_all`."""
    asked = getattr(request, "param", "moto")
    return s3_server if asked == "moto" else request.getfixturevalue(asked)
