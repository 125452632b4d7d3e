"""A real S3 server in a process of its own, and what a test looks at behind the back of the code under test."""

from __future__ import annotations

import http.client
import itertools
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

_numbers = itertools.count(1)
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"}


@dataclass
class Server:
    """Listens on the loopback interface; ends when it is closed."""

    scheme: ClassVar[str] = "s3"

    process: subprocess.Popen[str]
    port: int
    buckets: list[str] = field(default_factory=list)

    @classmethod
    def start(cls) -> Server:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("serve.py"))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip().isdecimal(), "the S3 server did not start"
        return cls(process, int(line))

    def close(self) -> None:
        self.process.communicate(timeout=30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, url: str | None = None) -> dict[str, str]:
        """What a user would have in the environment; `url` of something that stands between."""
        return {
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_ACCESS_KEY_ID": "key-of-a-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
            "AWS_REGION": "us-east-1",
            "HOME": "/nonexistent",
        }

    def new_bucket(self) -> str:
        name = f"bucket-{next(_numbers)}"
        assert self.ask("PUT", f"/{name}")[0] == 200
        return name

    def ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, target, body=body, headers=_SIGNED)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def keys(self, bucket: str) -> list[str]:
        """Every object's name."""
        return re.findall("<Key>(.*?)</Key>", self.ask("GET", f"/{bucket}?list-type=2")[1].decode())

    def unfinished(self, bucket: str) -> list[str]:
        """The objects of every upload that was begun and not ended."""
        return re.findall("<Key>(.*?)</Key>", self.ask("GET", f"/{bucket}?uploads")[1].decode())

    def object(self, bucket: str, key: str) -> bytes:
        status, data = self.ask("GET", f"/{bucket}/{quote(key)}")
        assert status == 200, (status, key)
        return data

    def put(self, bucket: str, key: str, data: bytes) -> None:
        assert self.ask("PUT", f"/{bucket}/{quote(key)}", data)[0] == 200
