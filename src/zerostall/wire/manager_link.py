"""A connection to the manager: one at a time, kept open, every wait bounded. No more than the standard library."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from zerostall.errors import CapabilityError, ManagerError
from zerostall.wire import cluster as w

if TYPE_CHECKING:
    from pathlib import Path

Answer = TypeVar("Answer")

MOST_BYTES = 256 << 20  # of an answer: the state of thousands of nodes fits


class ManagerLink:
    """For one thread. Connects when it is first used, and again when the manager was restarted.

    `url` may name several managers, with commas between them: the one that leads is found.
    """

    def __init__(self, url: str, secret: str, *, timeout: float, authorities: Path | None = None) -> None:
        self._places = [_place(each) for each in url.split(",")]
        self._at = 0
        self._tls = _tls(authorities) if any(place.secure for place in self._places) else None
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None

    @property
    def url(self) -> str:
        """Of the manager that is asked now."""
        return self._places[self._at].url

    def post(self, path: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Send a message and wait for its answer.

        Raises:
            ManagerError: it cannot be reached, or refuses.
        """
        return self._decoded(self._ask("POST", f"{w.PREFIX}/{path}", msgspec.json.encode(message)), kind)

    def get(self, path: str, kind: type[Answer]) -> Answer:
        """Ask for a document. Raises as `post`."""
        return self._decoded(self._ask("GET", f"{w.PREFIX}/{path}", None), kind)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
        for others in reversed(range(len(self._places))):
            try:
                return self._ask_this_one(method, path, body)
            except ManagerError as error:
                if error.kind not in ("", "standby") or not others:
                    raise
                self.close()
                self._at = (self._at + 1) % len(self._places)
        raise AssertionError("there is at least one manager")

    def _ask_this_one(self, method: str, path: str, body: bytes | None) -> bytes:
        again = self._connection is not None  # a kept connection may have been closed meanwhile; a fresh one has not
        while True:
            try:
                status, answer = self._once(method, path, body)
                break
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                self.close()
                if not again:
                    raise self._unreachable(error) from error
                again = False
            except (OSError, http.client.HTTPException) as error:
                self.close()
                raise self._unreachable(error) from error
        if status == 200:
            return answer
        try:
            refusal = msgspec.json.decode(answer, type=w.Refusal)
        except msgspec.MsgspecError:
            raise ManagerError(f"{self.url} answered with status {status}: is that a zerostall manager?") from None
        hint = "the token file must be the manager's own (ZEROSTALL_TOKEN_FILE)" if refusal.kind == "token" else ""
        raise ManagerError(f"the manager at {self.url} refuses: {refusal.reason}", kind=refusal.kind, hint=hint)

    def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if self._connection is None:
            place = self._places[self._at]
            self._connection = (
                http.client.HTTPSConnection(place.host, place.port, timeout=self._timeout, context=self._tls)
                if place.secure
                else http.client.HTTPConnection(place.host, place.port, timeout=self._timeout)
            )
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read(MOST_BYTES)
        if response.will_close:
            self.close()
        return response.status, answer

    def _decoded(self, body: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise ManagerError(f"{self.url} answered what is no {kind}: {error}") from error

    def _unreachable(self, error: Exception) -> ManagerError:
        return ManagerError(f"the manager at {self.url} cannot be reached: {error}", hint="start `zerostall manager`")


@dataclass(frozen=True, slots=True)
class _Place:
    url: str
    host: str
    port: int
    secure: bool


def _place(url: str) -> _Place:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/"):
        raise ValueError(f"{url!r} is not a manager's URL such as http://10.0.0.1:7077")
    secure = parts.scheme == "https"
    return _Place(url, parts.hostname, parts.port or (443 if secure else 7077), secure)


def _tls(authorities: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        raise CapabilityError(f"the certificates in {authorities} cannot be used: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
