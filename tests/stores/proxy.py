"""Stands between a client and an S3 server, does what it is told to, and is stricter than the server: a body that does
not have the CRC-32C that its header says is refused, as Amazon refuses it.
"""

from __future__ import annotations

import base64
import http.client
import re
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from stores.server import Server
from zerostall import native


@dataclass
class Request:
    """What came from the client."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and re.search(r"[?&](partNumber=|comp=block(&|$))", self.target) is not None

    @property
    def part(self) -> int | None:
        """Its number; a block says it in its name."""
        found = re.search(r"[?&]partNumber=(\d+)", self.target)
        if found is None and self.is_part and (block := re.search(r"[?&]blockid=([^&]+)", self.target)):
            found = re.match(r"(\d+)-", base64.b64decode(unquote(block[1])).decode())
        return int(found[1]) if found else None


def is_part(request: Request) -> bool:
    return request.is_part


def parts_of(requests: list[Request]) -> set[str]:
    return {request.target for request in requests if request.is_part}


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and unquote(urlsplit(request.target).path).endswith("manifest.json")


def is_complete(request: Request) -> bool:
    in_blocks = request.method == "PUT" and "comp=blocklist" in request.target
    return in_blocks or (request.method == "POST" and "uploadId=" in request.target)


@dataclass
class Rule:
    """What to do to requests that match, the first `times` of them.

    `do`: "drop" (the connection breaks, nothing reached the store), "lose" (it did, the answer is lost), "stall" (no
    answer until the proxy closes), "cut" (half of the answer), "flip" (one bit of the answer's body), "spoil" (one bit
    of the request's body), "hold" (waits for `released`), or a code such as "503 SlowDown".
    """

    do: str
    match: Callable[[Request], bool]
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    seen: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Listens on the loopback interface, on a port that the system picks. A context manager."""

    def __init__(self, server: Server) -> None:
        self.requests: list[Request] = []
        self.rules: list[Rule] = []
        self.lock = threading.Lock()
        self._closing = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                proxy._serve(self, request, server.port)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

        class Listener(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that went away

        self._listener = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for rule in self.rules:
            rule.released.set()
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join(30)

    def rule(self, do: str, match: Callable[[Request], bool], *, times: int = 1, **headers: str) -> Rule:
        made = Rule(do, match, times, {k.replace("_", "-"): v for k, v in headers.items()})
        with self.lock:
            self.rules.append(made)
        return made

    def count(self, match: Callable[[Request], bool]) -> int:
        """How many requests of that kind have come."""
        with self.lock:
            return sum(match(request) for request in self.requests)

    def _rule_for(self, request: Request) -> Rule | None:
        with self.lock:
            self.requests.append(request)
            for rule in self.rules:
                if rule.match(request):
                    rule.seen += 1
                    if rule.seen <= rule.times:
                        return rule
        return None

    def _serve(self, handler: BaseHTTPRequestHandler, request: Request, port: int) -> None:
        rule = self._rule_for(request)
        do = rule.do if rule else ""
        if rule is not None:
            rule.reached.set()
        if do == "hold":
            assert rule is not None
            rule.released.wait(60)
        if do == "drop":
            return self._hang_up(handler)
        if do == "stall":
            self._closing.wait(60)
            return self._hang_up(handler)
        if do[:3].isdecimal():
            status, _, code = do.partition(" ")
            text = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>"
            return self._answer(handler, request, int(status), rule.headers if rule else {}, text.encode())
        if do == "spoil":
            request.body = _flipped(request.body)
        if (wanted := request.headers.get("x-amz-checksum-crc32c")) and request.method == "PUT":
            found = base64.b64encode(native.crc32c(request.body).to_bytes(4, "big")).decode()
            if found != wanted:
                text = b"<Error><Code>BadDigest</Code><Message>The CRC32C did not match</Message></Error>"
                return self._answer(handler, request, 400, {}, text)
        status, headers, body = self._forward(request, port)
        if do == "lose":
            return self._hang_up(handler)
        if do == "flip":
            body = _flipped(body)
        if do == "cut":
            handler.send_response(status)
            for name, value in headers.items():
                handler.send_header(name, value)
            handler.send_header("content-length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2])
            return self._hang_up(handler)
        return self._answer(handler, request, status, headers, body)

    def _forward(self, request: Request, port: int) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(request.method, request.target, body=request.body, headers=request.headers)
            answer = connection.getresponse()
            data = answer.read()
            dropped = ("connection", "transfer-encoding", "server", "date")
            if request.method != "HEAD":
                dropped += ("content-length",)
            return answer.status, {k: v for k, v in answer.getheaders() if k.lower() not in dropped}, data
        finally:
            connection.close()

    def _answer(
        self, handler: BaseHTTPRequestHandler, request: Request, status: int, headers: dict[str, str], body: bytes
    ) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if request.method != "HEAD":
            handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        if request.method != "HEAD":
            handler.wfile.write(body)

    def _hang_up(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True


def _flipped(data: bytes) -> bytes:
    spoilt = bytearray(data)
    spoilt[len(spoilt) // 2] ^= 1
    return bytes(spoilt)
