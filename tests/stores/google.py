"""A stand-in of our own for Google Cloud Storage, made after the documentation of its XML API.

No emulator takes what obstore says: fake-gcs-server answers its listings and reads, and refuses its puts and uploads.
This one knows those few requests and no others, and is strict: a header or parameter that it does not know is refused
and makes the test fail, so that nothing is believed to work which only was not looked at. What it cannot show is how
Google itself behaves where the documentation is silent.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import threading
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from zerostall import native

_HARMLESS = {
    *("accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "date", "host"),
    "user-agent",
}
_PART = 5 << 20
_LIST = {"list-type", "prefix", "delimiter", "start-after", "continuation-token", "max-keys"}
_numbers = itertools.count(1)


@dataclass
class _Object:
    data: bytes
    generation: int
    e_tag: str


@dataclass
class _Upload:
    bucket: str
    name: str
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class _Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Google:
    """Listens on the loopback interface, in this process; ends when it is closed.

    Attributes:
        surprises: what came and is not known here.
    """

    scheme = "gs"

    def __init__(self) -> None:
        self.surprises: list[str] = []
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, _Object]] = {}
        self._uploads: dict[str, _Upload] = {}
        self._generations = itertools.count(1_700_000_000_000_001, 7)
        google = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                answer = google._answer(self.command, self.path, headers, body)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", answer.headers.get("x-length") or str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._listener.daemon_threads = True
        self.port = self._listener.server_address[1]
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join(30)

    def environment(self, url: str | None = None) -> dict[str, str]:
        """As `Server.environment`."""
        return {"STORAGE_EMULATOR_HOST": url or f"http://127.0.0.1:{self.port}", "HOME": "/nonexistent"}

    def new_bucket(self) -> str:
        name = f"bucket-{next(_numbers)}"
        self._buckets[name] = {}
        return name

    def keys(self, bucket: str) -> list[str]:
        """Every object's name."""
        return sorted(self._buckets[bucket])

    def unfinished(self, bucket: str) -> list[str]:
        """The objects of every upload that was begun and not ended."""
        return [upload.name for upload in self._uploads.values() if upload.bucket == bucket]

    def object(self, bucket: str, key: str) -> bytes:
        return self._buckets[bucket][key].data

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._store(self._buckets[bucket], key, data, f'"{hashlib.md5(data).hexdigest()}"')

    # ------------------------------------------------------------------------------------------------ requests

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> _Answer:
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        bucket, _, name = unquote(parts.path).removeprefix("/").partition("/")
        known = self._known(method, bool(name), query)
        allowed = _HARMLESS
        if known in (self._get, self._head):
            allowed = allowed | {"range"}
        elif known == self._put:
            allowed = allowed | {"x-goog-if-generation-match"}
        if known is None or not headers.keys() <= allowed:
            self.surprises.append(f"{method} {target} {sorted(headers)}")
            return _refusal(400, "InvalidArgument")
        with self._lock:
            try:
                if bucket not in self._buckets:
                    raise _Refused(404, "NoSuchBucket")
                return known(bucket, name, query, headers, body)
            except _Refused as refused:
                return _refusal(refused.status, refused.code)

    def _known(self, method: str, named: bool, query: dict[str, str]):
        asked = set(query)
        if not named:
            return self._list if method == "GET" and query.get("list-type") == "2" and asked <= _LIST else None
        return {
            ("GET", ()): self._get,
            ("HEAD", ()): self._head,
            ("PUT", ()): self._put,
            ("DELETE", ()): self._delete,
            ("POST", ("uploads",)): self._begin,
            ("PUT", ("partNumber", "uploadId")): self._part,
            ("POST", ("uploadId",)): self._complete,
            ("DELETE", ("uploadId",)): self._abort,
        }.get((method, tuple(sorted(asked))))

    def _store(self, objects: dict[str, _Object], name: str, data: bytes, e_tag: str) -> _Object:
        objects[name] = _Object(data, next(self._generations), e_tag)
        return objects[name]

    def _found(self, bucket: str, name: str) -> _Object:
        if name not in self._buckets[bucket]:
            raise _Refused(404, "NoSuchKey")
        return self._buckets[bucket][name]

    def _put(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        if (wanted := headers.get("x-goog-if-generation-match")) is not None:
            there = self._buckets[bucket].get(name)
            if int(wanted) != (there.generation if there else 0):
                raise _Refused(412, "PreconditionFailed")
        self.put(bucket, name, body)
        return _Answer(headers=_facts(self._buckets[bucket][name]))

    def _get(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        found = self._found(bucket, name)
        if "range" not in headers:
            return _Answer(body=found.data, headers=_facts(found))
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers["range"])
        if match is None or int(match[1]) >= len(found.data):
            raise _Refused(416, "InvalidRange")
        begin, end = int(match[1]), min(int(match[2] or len(found.data) - 1), len(found.data) - 1)
        told = {"Content-Range": f"bytes {begin}-{end}/{len(found.data)}"}
        return _Answer(206, found.data[begin : end + 1], _facts(found) | told)

    def _head(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        found = self._found(bucket, name)
        return _Answer(headers=_facts(found) | {"x-length": str(len(found.data))})

    def _delete(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        self._found(bucket, name)
        del self._buckets[bucket][name]
        return _Answer(204)

    def _list(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = min(int(query.get("max-keys", 1000)), 1000)
        rows: dict[str, str] = {}
        for key in sorted(self._buckets[bucket]):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            folder = prefix + rest.split(delimiter)[0] + delimiter if delimiter and delimiter in rest else ""
            shown = folder or key
            if shown <= after or (folder and after.startswith(folder)):
                continue
            found = self._buckets[bucket][key]
            rows[shown] = (
                f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
                if folder
                else f"<Contents><Key>{escape(key)}</Key><Generation>{found.generation}</Generation>"
                f"<LastModified>2026-01-02T03:04:05.678Z</LastModified><ETag>{escape(found.e_tag)}</ETag>"
                f"<Size>{len(found.data)}</Size></Contents>"
            )
        page = list(rows)[:most]
        more = len(rows) > len(page)
        text = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        return _xml("ListBucketResult", f"<Name>{bucket}</Name>{text}" + "".join(rows[one] for one in page))

    def _begin(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        if headers.get("content-length") != "0":
            raise _Refused(411, "MissingContentLength")
        upload = f"upload-{next(_numbers)}"
        self._uploads[upload] = _Upload(bucket, name)
        told = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
        return _xml("InitiateMultipartUploadResult", told)

    def _upload(self, bucket: str, name: str, query: dict[str, str]) -> _Upload:
        found = self._uploads.get(query["uploadId"])
        if found is None or (found.bucket, found.name) != (bucket, name):
            raise _Refused(404, "NoSuchUpload")
        return found

    def _part(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        number = int(query["partNumber"])
        if not 1 <= number <= 10_000:
            raise _Refused(400, "InvalidArgument")
        e_tag = f'"{hashlib.md5(body).hexdigest()}"'
        self._upload(bucket, name, query).parts[number] = e_tag, body
        return _Answer(headers={"ETag": e_tag})

    def _complete(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        upload = self._upload(bucket, name, query)
        told = re.findall(r"<Part>(.*?)</Part>", body.decode(), re.DOTALL)
        numbers = [int(re.findall(r"<PartNumber>(\d+)</PartNumber>", one)[0]) for one in told]
        tags = [re.findall(r"<ETag>(.*?)</ETag>", one)[0].replace("&quot;", '"') for one in told]
        if not numbers or numbers != sorted(set(numbers)):
            raise _Refused(400, "InvalidPartOrder")
        chosen = [upload.parts.get(number) for number in numbers]
        if any(part is None or part[0].strip('"') != tag.strip('"') for part, tag in zip(chosen, tags, strict=True)):
            raise _Refused(400, "InvalidPart")
        pieces = [part[1] for part in chosen if part is not None]
        if any(len(piece) < _PART for piece in pieces[:-1]):
            raise _Refused(400, "EntityTooSmall")
        del self._uploads[query["uploadId"]]
        made = self._store(self._buckets[bucket], name, b"".join(pieces), f'"-CJ{next(_numbers)}="')  # no MD5
        text = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><ETag>{escape(made.e_tag)}</ETag>"
        return _xml("CompleteMultipartUploadResult", text, _facts(made))

    def _abort(self, bucket: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        self._upload(bucket, name, query)
        del self._uploads[query["uploadId"]]
        return _Answer(204)


def _facts(found: _Object) -> dict[str, str]:
    return {
        "ETag": found.e_tag,
        "Last-Modified": formatdate(1_700_000_000, usegmt=True),
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": "1",
        "x-goog-hash": f"crc32c={base64.b64encode(native.crc32c(found.data).to_bytes(4, 'big')).decode()}",
    }


def _xml(kind: str, inside: str, headers: dict[str, str] | None = None) -> _Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{kind} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inside}</{kind}>'
    return _Answer(body=text.encode(), headers={"Content-Type": "application/xml", **(headers or {})})


def _refusal(status: int, code: str) -> _Answer:
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>as documented</Message></Error>"
    return _Answer(status, text.encode(), {"Content-Type": "application/xml"})
