"""etcd as the manager uses it: its JSON gateway, over the standard library. Keys and values are bytes.

Several endpoints are tried in turn, so that any minority of members may be gone. For one thread.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from zerostall.errors import CapabilityError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT = 3.0
MOST_OPERATIONS = 100
"""In one transaction: etcd itself takes 128 by default."""

_MOST_BYTES = 64 << 20
_PAGE = 1000

Answer = TypeVar("Answer")


class Pair(msgspec.Struct, frozen=True):
    """A key with its value; all of it base64 or decimal text, as it comes."""

    key: str
    value: str = ""
    create_revision: str = "0"


class Ranged(msgspec.Struct, frozen=True):
    kvs: tuple[Pair, ...] = ()
    more: bool = False


class Response(msgspec.Struct, frozen=True):
    response_range: Ranged | None = None


class Header(msgspec.Struct, frozen=True):
    revision: str = "0"


class Committed(msgspec.Struct, frozen=True):
    header: Header
    succeeded: bool = False
    responses: tuple[Response, ...] = ()


class Granted(msgspec.Struct, frozen=True):
    ID: str
    TTL: str = "0"


class KeptAlive(msgspec.Struct, frozen=True):
    result: Granted


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster's state is kept: `etcd://host:2379,host:2379/prefix`, `etcds://` with TLS."""

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Place:
        """ValueError for what is no such URL."""
        scheme, _, rest = url.partition("://")
        hosts, _, prefix = rest.partition("/")
        endpoints: list[tuple[str, int]] = []
        for host in hosts.split(","):
            name, colon, port = host.rpartition(":")
            if not colon:
                name, port = host, "2379"
            if not name or not port.isdecimal() or int(port) >= 1 << 16:
                raise ValueError(f"{url!r}: {host!r} is no address such as 10.0.0.1:2379")
            endpoints.append((name.strip("[]"), int(port)))
        if scheme not in ("etcd", "etcds"):
            raise ValueError(f"{url!r} is not a URL such as etcd://10.0.0.1:2379,10.0.0.2:2379/zerostall")
        return cls(tuple(endpoints), prefix.strip("/") or "zerostall", scheme == "etcds")

    def key(self, *parts: str) -> bytes:
        return "/".join((self.prefix, *parts)).encode(errors="surrogateescape")


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    value: bytes
    lease: str = "0"


@dataclass(frozen=True, slots=True)
class Delete:
    """Of one key, or of all from `key` to before `end`."""

    key: bytes
    end: bytes = b""


class Etcd:
    """Every call raises StorageError when no member answers, or etcd refuses."""

    def __init__(self, place: Place, authorities: Path | None = None) -> None:
        self.place = place
        self._tls: ssl.SSLContext | None = None
        if place.tls:
            try:
                self._tls = ssl.create_default_context(cafile=authorities)
            except (OSError, ssl.SSLError) as error:
                raise CapabilityError(f"the certificates in {authorities} cannot be used: {error}") from error
        self._at = 0
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def commit(
        self, operations: list[Put | Delete], *, key: bytes, created: int, otherwise_read: bool = False
    ) -> Committed:
        """Do all of it if `key` was created at that revision (0: if it does not exist), else nothing."""
        message = {
            "compare": [{"key": _text(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(created)}],
            "success": [_operation(operation) for operation in operations],
            "failure": [{"request_range": {"key": _text(key)}}] if otherwise_read else [],
        }
        return self._ask("/v3/kv/txn", message, Committed)

    def read(self, start: bytes) -> list[tuple[bytes, bytes]]:
        """All keys that begin so, in their order, with their values."""
        end, found = after(start), []
        at = start
        while True:
            page = self._ask("/v3/kv/range", {"key": _text(at), "range_end": _text(end), "limit": str(_PAGE)}, Ranged)
            found += [(_bytes(pair.key), _bytes(pair.value)) for pair in page.kvs]
            if not page.more or not page.kvs:
                return found
            at = _bytes(page.kvs[-1].key) + b"\0"

    def grant(self, seconds: int) -> str:
        """A lease of so many seconds."""
        return self._ask("/v3/lease/grant", {"TTL": str(seconds)}, Granted).ID

    def keep_alive(self, lease: str) -> bool:
        """Begin the lease's time anew; False when it has run out."""
        return self._ask("/v3/lease/keepalive", {"ID": lease}, KeptAlive, stream=True).result.TTL != "0"

    def revoke(self, lease: str) -> None:
        self._ask("/v3/lease/revoke", {"ID": lease}, msgspec.Raw)

    def wait(self, key: bytes, revision: int, seconds: float) -> None:
        """Return when something happens to the key from that revision on, or after about so many seconds."""
        message = {"create_request": {"key": _text(key), "start_revision": str(revision)}}
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = self._connect(*self.place.endpoints[self._at], seconds)
            try:
                connection.request("POST", "/v3/watch", msgspec.json.encode(message))
                answer = connection.getresponse()
                while line := answer.readline(_MOST_BYTES):
                    if b'"events"' in line or b'"canceled"' in line:
                        return
            finally:
                connection.close()

    def _connect(self, host: str, port: int, seconds: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=seconds)

    def _ask(self, path: str, message: object, kind: type[Answer], *, stream: bool = False) -> Answer:
        """Each member is asked once; one that fails is asked last the next time. Of a stream the first line counts."""
        problem = ""
        for _ in range(len(self.place.endpoints) + (self._connection is not None)):
            try:
                if self._connection is None:
                    self._connection = self._connect(*self.place.endpoints[self._at], TIMEOUT)
                self._connection.request("POST", path, msgspec.json.encode(message))
                answer = self._connection.getresponse()
                body = answer.readline(_MOST_BYTES) if stream else answer.read(_MOST_BYTES)
                if stream:
                    self.close()  # more may come on it
                if answer.status == 200:
                    return msgspec.json.decode(body, type=kind)
                problem = f"status {answer.status}: {body[:200].decode(errors='replace')}"
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            except msgspec.MsgspecError as error:
                problem = f"not an answer of etcd's: {error}"
            self.close()
            self._at = (self._at + 1) % len(self.place.endpoints)
        raise StorageError(f"etcd at {self.place.endpoints} does not answer {path}: {problem}")


def after(start: bytes) -> bytes:
    """The first key behind all that begin with `start`."""
    return start[:-1] + bytes([start[-1] + 1])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _operation(operation: Put | Delete) -> dict[str, dict[str, str]]:
    if isinstance(operation, Put):
        put = {"key": _text(operation.key), "value": _text(operation.value), "lease": operation.lease}
        return {"request_put": put}
    span = {"key": _text(operation.key), **({"range_end": _text(operation.end)} if operation.end else {})}
    return {"request_delete_range": span}
