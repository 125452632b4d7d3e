"""What obstore does not say to S3: parts with their checksum, which parts are there, which uploads broke off.

Only as much of the protocol as uploads need. Every request may be sent again, so each is, a few times, when the
connection breaks or the store is busy; `Retry-After` is respected.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import random
import re
import socket
import ssl
import time
import urllib.request
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

from zerostall.core import backoff, signing
from zerostall.errors import StorageError
from zerostall.tiers.store import refusal, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zerostall.core.signing import Keys
    from zerostall.core.upload_parts import Part
    from zerostall.tiers.store import Store

_TRIES = 5
_BUSY = (429, 500, 502, 503, 504)
_AGAIN = (
    "InternalError",
    "SlowDown",
    "ServiceUnavailable",
    "RequestTimeout",
    "BadDigest",
    "XAmzContentChecksumMismatch",
    "IncompleteBody",
)
"""What a store says of a request that is worth sending again, whatever the status: it broke on the way."""

_MOST_ANSWER = 64 << 20
_XML = {"content-type": "application/xml"}
_LEFT_TO_OBSTORE = {
    "AWS_S3_EXPRESS": "S3 Express",
    "AWS_REQUEST_PAYER": "requester pays",
    "AWS_SKIP_SIGNATURE": "unsigned requests",
    "AWS_SERVER_SIDE_ENCRYPTION": "a chosen encryption",
    "AWS_SSE_CUSTOMER_KEY_BASE64": "a key of one's own",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "an endpoint that names the bucket",
}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part as the store has it."""

    nbytes: int
    checksum: int | None
    e_tag: str

    def holds(self, part: Part, view: Callable[[], memoryview]) -> bool:
        """Whether it is that part, by the CRC-32C that the store has of it; by its tag, where that is an MD5, else."""
        if self.nbytes != part.nbytes:
            return False
        if self.checksum is not None:
            return self.checksum == part.checksum
        return self.e_tag.strip('"') == hashlib.md5(view(), usedforsecurity=False).hexdigest()


def why_not(store: Store) -> str:
    """In words, why uploads to this store are left to obstore; empty where they need not be."""
    if store.scheme not in ("s3", "s3a"):
        return f"{store.scheme}:// is not S3"
    for name, what in _LEFT_TO_OBSTORE.items():
        if store.environment.get(name, "").lower() not in ("", "0", "false"):
            return f"{what} ({name})"
    if store.keys() is None:
        return "the credentials come from the machine, and only obstore asks it"
    host = urlsplit(_endpoint(store)).hostname or ""
    if urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return "a proxy stands between"
    return ""


class S3:
    """One bucket. Any thread; a connection serves one request at a time and is kept for the next.

    Raises:
        StorageError: the store refused, or could not be reached; the message says what it said.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bucket = store.bucket
        self._endpoint = urlsplit(_endpoint(store))
        self._host = self._endpoint.netloc
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._tls = ssl.create_default_context() if self._endpoint.scheme == "https" else None

    # -------------------------------------------------------------------------------------------------- requests

    def put(self, key: str, data: memoryview, checksum: int) -> None:
        """Store an object in one request, checked by the store."""
        self._ask("PUT", key, headers=_crc(checksum), body=data)

    def begin(self, key: str) -> str:
        """Begin an upload; its id."""
        whole = {"x-amz-checksum-algorithm": "CRC32C", "x-amz-checksum-type": "FULL_OBJECT"}
        answer = self._ask("POST", key, {"uploads": ""}, headers=whole)
        return _text(_tree(answer), "UploadId")

    def put_part(self, key: str, upload: str, number: int, data: memoryview, checksum: int) -> str:
        """Send a part, checked by the store; its tag."""
        query = {"partNumber": str(number), "uploadId": upload}
        answer = self._ask("PUT", key, query, headers=_crc(checksum), body=data)
        return answer.headers.get("etag", "")

    def find_upload(self, key: str) -> str | None:
        """The newest upload of this object that was begun and not ended."""
        found = [(begun, upload) for name, upload, begun in self.uploads(key) if name == key]
        return max(found)[1] if found else None

    def uploads(self, below: str) -> Iterator[tuple[str, str, float]]:
        """Key, id and time of begin of every upload that was not ended, of keys that begin with `below`."""
        query = {"uploads": "", "prefix": below, "encoding-type": "url"}
        while True:
            tree = _tree(self._ask("GET", "", query))
            for one in _all(tree, "Upload"):
                yield unquote(_text(one, "Key")), _text(one, "UploadId"), _moment(_text(one, "Initiated"))
            if _text(tree, "IsTruncated", "false") != "true":
                return
            query |= {
                "key-marker": unquote(_text(tree, "NextKeyMarker")),
                "upload-id-marker": _text(tree, "NextUploadIdMarker"),
            }

    def parts(self, key: str, upload: str) -> dict[int, StoredPart]:
        """The parts of an upload that are there, by number."""
        found: dict[int, StoredPart] = {}
        query = {"uploadId": upload}
        while True:
            tree = _tree(self._ask("GET", key, query))
            for one in _all(tree, "Part"):
                crc = _text(one, "ChecksumCRC32C", "")
                number = int(_text(one, "PartNumber"))
                checksum = int.from_bytes(base64.b64decode(crc), "big") if crc else None
                found[number] = StoredPart(int(_text(one, "Size")), checksum, _text(one, "ETag"))
            if _text(tree, "IsTruncated", "false") != "true":
                return found
            query["part-number-marker"] = _text(tree, "NextPartNumberMarker")

    def complete(self, key: str, upload: str, parts: list[tuple[str, int]], checksum: int) -> None:
        """End an upload: the object is there, or (StorageError) it is not."""
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{_escaped(tag)}</ETag>"
            f"<ChecksumCRC32C>{_base64(crc)}</ChecksumCRC32C></Part>"
            for number, (tag, crc) in enumerate(parts, 1)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        headers = _crc(checksum) | {"x-amz-checksum-type": "FULL_OBJECT"} | _XML
        self._ask("POST", key, {"uploadId": upload}, headers=headers, body=memoryview(body))

    def abort(self, key: str, upload: str) -> None:
        """Throw an upload's parts away."""
        self._ask("DELETE", key, {"uploadId": upload}, missing_is_fine=True)

    # ------------------------------------------------------------------------------------------------- the wire

    def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: memoryview | None = None,
        missing_is_fine: bool = False,
    ) -> Answer:
        what = f"cannot {method} {self._store.scheme}://{self._bucket}/{key}"
        for failures in range(1, _TRIES + 1):
            try:
                answer = self._once(method, key, query or {}, headers or {}, body)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, StorageError):
                    raise
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

    def _once(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: memoryview | None
    ) -> Answer:
        path = signing.path_of(self._endpoint.path.strip("/"), self._bucket, key)
        small = body is None or len(body) < 1 << 20
        payload = hashlib.sha256(body or b"").hexdigest() if small else signing.UNSIGNED
        sent = signing.sign(
            method,
            path,
            query,
            {"host": self._host, **headers},
            keys=self._keys(),
            region=self._store.region,
            stamp=datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
            payload=payload,
        )
        del sent["host"]
        sent["content-length"] = str(len(body) if body is not None else 0)
        target = f"{path}?{signing.query_of(query)}" if query else path
        connection = self._connection()
        try:
            connection.request(method, target, body=body, headers={"Host": self._host, **sent})
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

    def _keys(self) -> Keys:
        keys = self._store.keys()
        if keys is None:
            raise StorageError(f"{self._store.url}: the credentials that were there are gone")
        return keys

    def _connection(self) -> http.client.HTTPConnection:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        host, port, timeout = self._endpoint.hostname or "", self._endpoint.port, self._store.timeout
        if self._tls is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout, blocksize=1 << 20)
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


def _endpoint(store: Store) -> str:
    if store.endpoint:
        return store.endpoint
    suffix = "amazonaws.com.cn" if store.region.startswith("cn-") else "amazonaws.com"
    return f"https://s3.{store.region}.{suffix}"


def _crc(checksum: int) -> dict[str, str]:
    return {"x-amz-checksum-crc32c": _base64(checksum)}


def _base64(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _tree(answer: Answer) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(answer.body)
    except ElementTree.ParseError as error:
        raise StorageError(f"the store answered what is no XML: {error}") from None


def _all(tree: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [child for child in tree if child.tag.rpartition("}")[2] == name]


def _text(tree: ElementTree.Element, name: str, default: str | None = None) -> str:
    found = next((child.text or "" for child in _all(tree, name)), default)
    if found is None:
        raise StorageError(f"the store's answer lacks {name}")
    return found


def _moment(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return time.time()  # a store that does not say when: never old enough to be thrown away


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def _asked(headers: Mapping[str, str]) -> float:
    """Seconds that the store asks to wait; a minute at most."""
    text = headers.get("retry-after", "")
    return min(60.0, float(text)) if re.fullmatch(r"\d{1,6}", text) else 0.0


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the store did not answer in time"
    return f"{type(error).__name__}: {error}"
