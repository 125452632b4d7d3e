"""Requests to a store over connections that are kept.

Every request may be sent again, so each is, a few times, when the connection breaks or the store is busy; `Retry-After`
is respected.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
import ssl
import time
import urllib.request
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from xml.etree import ElementTree

from zerostall.core import backoff
from zerostall.errors import StorageError
from zerostall.tiers.store import refusal, told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from urllib.parse import SplitResult

_TRIES = 5
_BUSY = (429, 500, 502, 503, 504)
_AGAIN = (
    "InternalError",
    "SlowDown",
    "ServiceUnavailable",
    "ServerBusy",
    "OperationTimedOut",
    "RequestTimeout",
    "BadDigest",
    "XAmzContentChecksumMismatch",
    "IncompleteBody",
)
"""What a store says of a request that is worth sending again, whatever the status: it broke on the way."""

_MOST_ANSWER = 64 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def tree(self) -> ElementTree.Element:
        try:
            return ElementTree.fromstring(self.body)
        except ElementTree.ParseError as error:
            raise StorageError(f"the store answered what is no XML: {error}") from None


def proxy_between(endpoint: str) -> str:
    """In words, that requests to this URL go by a proxy, of which connections here know nothing; empty otherwise."""
    host = urlsplit(endpoint).hostname or ""
    bypassed = not urllib.request.getproxies() or urllib.request.proxy_bypass(host)
    return "" if bypassed else "a proxy stands between"


class Connections:
    """To one endpoint. Any thread; a connection serves one request at a time and is kept for the next.

    Args:
        timeout: seconds that the store may be silent.
    """

    def __init__(self, endpoint: SplitResult, timeout: float) -> None:
        self.host = endpoint.netloc
        self._endpoint = endpoint
        self._timeout = timeout
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._tls = ssl.create_default_context() if endpoint.scheme == "https" else None

    def ask(
        self,
        what: str,
        method: str,
        signed: Callable[[], tuple[str, Mapping[str, str]]],
        body: memoryview | None = None,
        *,
        missing_is_fine: bool = False,
    ) -> Answer:
        """Send a request until it is answered.

        Args:
            what: cannot be done, in messages: "cannot PUT s3://…".
            signed: gives the path with its query, and the headers, anew for each try.
            missing_is_fine: 404 is an answer.

        Raises:
            StorageError: the store refused, or could not be reached; the message says what it said.
        """
        for failures in range(1, _TRIES + 1):
            target, headers = signed()
            try:
                answer = self._once(method, target, headers, body)
            except (OSError, http.client.HTTPException) as error:
                if failures == _TRIES:
                    raise StorageError(f"{what}: {_words(error)}", errno=getattr(error, "errno", None)) from error
                time.sleep(backoff.pause(failures, random.random()))
                continue
            text = answer.body.decode("utf-8", "replace")
            wrong = answer.status // 100 != 2 or (method == "POST" and "<Error>" in text)
            if not wrong or (missing_is_fine and answer.status == 404):
                return answer
            code, sentence = told(text)
            if (answer.status not in _BUSY and code not in _AGAIN) or failures == _TRIES:
                raise refusal(what, code or str(answer.status), sentence, None)
            time.sleep(max(backoff.pause(failures, random.random()), _asked(answer.headers)))
        raise AssertionError("unreachable")

    def _once(self, method: str, target: str, headers: Mapping[str, str], body: memoryview | None) -> Answer:
        connection = self._connection()
        try:
            connection.request(method, target, body=body, headers={"Host": self.host, **headers})
            response = connection.getresponse()
            data = response.read(_MOST_ANSWER)
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, data)

    def _connection(self) -> http.client.HTTPConnection:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        host, port = self._endpoint.hostname or "", self._endpoint.port
        if self._tls is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout, blocksize=1 << 20)
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the connections that no request uses."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


def all_named(tree: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """The children of that name, whatever their namespace."""
    return [child for child in tree if child.tag.rpartition("}")[2] == name]


def text_of(tree: ElementTree.Element, name: str, default: str | None = None) -> str:
    """The text of the first child of that name.

    Raises:
        StorageError: there is none, and no default.
    """
    found = next((child.text or "" for child in all_named(tree, name)), default)
    if found is None:
        raise StorageError(f"the store's answer lacks {name}")
    return found


def _asked(headers: Mapping[str, str]) -> float:
    """Seconds that the store asks to wait; a minute at most."""
    text = headers.get("retry-after", "")
    return min(60.0, float(text)) if re.fullmatch(r"\d{1,6}", text) else 0.0


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the store did not answer in time"
    return f"{type(error).__name__}: {error}"
