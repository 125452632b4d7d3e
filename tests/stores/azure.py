"""Microsoft's own stand-in for its blob store, azurite, where it is installed (npm install azurite)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import itertools
import os
import re
import shutil
import subprocess
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlencode

from free_ports import free_ports

_ACCOUNT = "devstoreaccount1"  # azurite's, and known to everybody
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_numbers = itertools.count(1)


def program() -> str | None:
    """The server's program: ZEROSTALL_AZURITE, or what the path has; None where there is none."""
    return os.environ.get("ZEROSTALL_AZURITE") or shutil.which("azurite-blob")


class Azurite:
    """Listens on the loopback interface; ends when it is closed."""

    scheme = "az"

    def __init__(self, folder: Path) -> None:
        found = program()
        assert found is not None
        (self.port,) = free_ports(1)
        options = ["--blobPort", str(self.port), "--location", str(folder), "--silent", "--skipApiVersionCheck"]
        self._process = subprocess.Popen([found, "--blobHost", "127.0.0.1", *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while self._ask("GET", "/", {"comp": "list"})[0] is None:
            assert self._process.poll() is None and time.monotonic() < deadline, "azurite did not start"
            time.sleep(0.2)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.kill()  # asked to leave it takes a quarter of a minute
        self._process.wait(30)

    def environment(self, url: str | None = None) -> dict[str, str]:
        """As `Server.environment`."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"{url or self.url}/{_ACCOUNT}",
            "HOME": "/nonexistent",
        }

    def token(self) -> str:
        """A SAS token for all of the account."""
        said = {"sp": "rwdlacup", "ss": "b", "srt": "sco", "st": "", "se": "2100-01-01T00:00:00Z", "sip": "", "spr": ""}
        said |= {"sv": "2021-08-06", "ses": ""}
        text = "\n".join([_ACCOUNT, *said.values(), ""])
        mark = hmac.digest(base64.b64decode(_KEY), text.encode(), "sha256")
        return urlencode({**{k: v for k, v in said.items() if v}, "sig": base64.b64encode(mark).decode()})

    def new_bucket(self) -> str:
        name = f"container-{next(_numbers)}"
        assert self._ask("PUT", f"/{name}", {"restype": "container"})[0] == 201
        return name

    def keys(self, bucket: str) -> list[str]:
        """Every blob's name."""
        return self._names(bucket, "")

    def unfinished(self, bucket: str) -> list[str]:
        """Blobs of which there are blocks alone."""
        return [name for name in self._names(bucket, "uncommittedblobs") if name not in self.keys(bucket)]

    def _names(self, bucket: str, include: str) -> list[str]:
        query = {"comp": "list", "restype": "container", **({"include": include} if include else {})}
        status, body = self._ask("GET", f"/{bucket}", query)
        assert status == 200, body
        return re.findall("<Name>(.*?)</Name>", body.decode())

    def _ask(self, method: str, path: str, query: dict[str, str]) -> tuple[int | None, bytes]:
        """Status and body of the answer; None where nobody listens yet."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        told = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        resource = f"/{_ACCOUNT}/{_ACCOUNT}{path}" + "".join(f"\n{name}:{query[name]}" for name in sorted(query))
        text = "\n".join([method, *[""] * 11, ""]) + told + resource
        mark = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(mark.digest()).decode()}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            words = "&".join(f"{name}={value}" for name, value in query.items())
            connection.request(method, f"/{_ACCOUNT}{path}?{words}", headers={**headers, "Content-Length": "0"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return None, b""
        finally:
            connection.close()
