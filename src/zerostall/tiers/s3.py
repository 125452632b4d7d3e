"""What obstore does not say to S3: parts with their checksum, which parts are there, which uploads broke off.

Only as much of the protocol as uploads need.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from zerostall.core import signing
from zerostall.errors import StorageError
from zerostall.tiers.connections import Answer, Connections, all_named, proxy_between, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zerostall.core.signing import Keys
    from zerostall.core.upload_parts import Part
    from zerostall.tiers.store import Store

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
    return proxy_between(_endpoint(store))


class S3:
    """One bucket. Any thread.

    Raises:
        StorageError: the store refused, or could not be reached; the message says what it said.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bucket = store.bucket
        self._endpoint = urlsplit(_endpoint(store))
        self._connections = Connections(self._endpoint, store.timeout)

    # -------------------------------------------------------------------------------------------------- requests

    def put(self, key: str, data: memoryview, checksum: int) -> None:
        """Store an object in one request, checked by the store."""
        self._ask("PUT", key, headers=_crc(checksum), body=data)

    def begin(self, key: str) -> str:
        """Begin an upload; its id."""
        whole = {"x-amz-checksum-algorithm": "CRC32C", "x-amz-checksum-type": "FULL_OBJECT"}
        answer = self._ask("POST", key, {"uploads": ""}, headers=whole)
        return text_of(answer.tree(), "UploadId")

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
            tree = self._ask("GET", "", query).tree()
            for one in all_named(tree, "Upload"):
                yield unquote(text_of(one, "Key")), text_of(one, "UploadId"), _moment(text_of(one, "Initiated"))
            if text_of(tree, "IsTruncated", "false") != "true":
                return
            query |= {
                "key-marker": unquote(text_of(tree, "NextKeyMarker")),
                "upload-id-marker": text_of(tree, "NextUploadIdMarker"),
            }

    def parts(self, key: str, upload: str) -> dict[int, StoredPart]:
        """The parts of an upload that are there, by number."""
        found: dict[int, StoredPart] = {}
        query = {"uploadId": upload}
        while True:
            tree = self._ask("GET", key, query).tree()
            for one in all_named(tree, "Part"):
                crc = text_of(one, "ChecksumCRC32C", "")
                number = int(text_of(one, "PartNumber"))
                checksum = int.from_bytes(base64.b64decode(crc), "big") if crc else None
                found[number] = StoredPart(int(text_of(one, "Size")), checksum, text_of(one, "ETag"))
            if text_of(tree, "IsTruncated", "false") != "true":
                return found
            query["part-number-marker"] = text_of(tree, "NextPartNumberMarker")

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
        path = signing.path_of(self._endpoint.path.strip("/"), self._bucket, key)
        query = query or {}
        small = body is None or len(body) < 1 << 20
        payload = hashlib.sha256(body or b"").hexdigest() if small else signing.UNSIGNED

        def signed() -> tuple[str, dict[str, str]]:
            sent = signing.sign(
                method,
                path,
                query,
                {"host": self._connections.host, **(headers or {})},
                keys=self._keys(),
                region=self._store.region,
                stamp=datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
                payload=payload,
            )
            del sent["host"]
            sent["content-length"] = str(len(body) if body is not None else 0)
            return (f"{path}?{signing.query_of(query)}" if query else path), sent

        what = f"cannot {method} {self._store.scheme}://{self._bucket}/{key}"
        return self._connections.ask(what, method, signed, body, missing_is_fine=missing_is_fine)

    def _keys(self) -> Keys:
        keys = self._store.keys()
        if keys is None:
            raise StorageError(f"{self._store.url}: the credentials that were there are gone")
        return keys

    def close(self) -> None:
        """Close the connections that no request uses."""
        self._connections.close()


def _endpoint(store: Store) -> str:
    if store.endpoint:
        return store.endpoint
    suffix = "amazonaws.com.cn" if store.region.startswith("cn-") else "amazonaws.com"
    return f"https://s3.{store.region}.{suffix}"


def _crc(checksum: int) -> dict[str, str]:
    return {"x-amz-checksum-crc32c": _base64(checksum)}


def _base64(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _moment(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return time.time()  # a store that does not say when: never old enough to be thrown away


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
