"""The manager's HTTP service: who may speak, how much, and what they are answered."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from zerostall.core import placement
from zerostall.manager import page, showing
from zerostall.manager.control import Control
from zerostall.manager.metrics import exposition
from zerostall.telemetry import log, say_once
from zerostall.wire import cluster as w
from zerostall.wire import token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from zerostall.manager.etcd_store import EtcdStore
    from zerostall.manager.settings import ManagerSettings
    from zerostall.manager.store import Store

TICKS = 4
"""How often per heartbeat interval everything is decided anew."""

_BODY_SECONDS = 10.0
_JSON = "application/json"
_STATUS = {
    "token": 401,
    "standby": 503,
    "unknown": 404,
    "taken": 409,
    "fenced": 409,
    "late": 409,
    "malformed": 400,
    "oversized": 413,
    "failed": 500,
}

Message = TypeVar("Message", bound=msgspec.Struct)


class Service:
    """One manager in this process. Everything but storing and placing happens on the loop that runs `serve`."""

    def __init__(
        self, settings: ManagerSettings, store: Store | EtcdStore, secret: str, leads: Callable[[], bool] = lambda: True
    ) -> None:
        self.control = Control(settings.patience, store.load(), settings.fabric)
        self._store = store
        self._secret = secret
        self._settings = settings
        self._started = time.monotonic()
        self._took: deque[float] = deque(maxlen=4096)
        self._storing = asyncio.Lock()
        self._shown: tuple[float, bytes] = (0.0, b"")
        self.app = self._routes(leads)

    async def serve(self, ready: Callable[[int], None] = lambda _: None) -> None:
        """Serve until cancelled; `ready` is told the port.

        Raises:
            OSError: the address is taken or not this machine's.
        """
        async with _listening(self.app, self._settings) as port:
            try:
                ready(port)
                await self._tick_for_ever()
            finally:
                await self._save()

    # ---------------------------------------------------------------------------------------------------- ticks

    async def _tick_for_ever(self) -> None:
        pause = self._settings.patience.interval / TICKS
        placing: asyncio.Task[None] | None = None
        while True:
            start = time.perf_counter()
            self.control.tick(time.monotonic(), time.time())
            self._took.append(time.perf_counter() - start)
            await self._save()
            if placing is None or placing.done():
                placing = asyncio.create_task(self._place())
            await asyncio.sleep(pause)

    async def _place(self) -> None:
        question = self.control.placing.question()
        if question is None:
            return
        # On another thread: for thousands of nodes it takes a tenth of a second, and heartbeats go on meanwhile.
        answer = await asyncio.to_thread(
            placement.place,
            question.loads,
            question.sites,
            copies=self._settings.copies,
            before=question.before,
        )
        self.control.placing.placed(answer)

    async def _save(self) -> None:
        async with self._storing:
            batch = self.control.take_batch()
            if not batch:
                return
            try:
                await asyncio.to_thread(self._store.save, batch)
            except OSError as error:
                say_once("store", "what happens is not stored: %s", error)
                raise

    def decision_seconds(self) -> float:
        """The 99th percentile of how long it took, lately, to decide everything anew."""
        took = sorted(self._took)
        return took[int(len(took) * 0.99)] if took else 0.0

    # --------------------------------------------------------------------------------------------------- routes

    def _routes(self, leads: Callable[[], bool]) -> web.Application:
        app = web.Application(client_max_size=w.MOST_BYTES, middlewares=[_guarded(self._secret, leads)])
        app.add_routes(
            [
                web.post(f"{w.PREFIX}/join", self._join),
                web.post(f"{w.PREFIX}/report", self._report),
                web.post(f"{w.PREFIX}/leave", self._leave),
                web.post(f"{w.PREFIX}/whereis", self._whereis),
                web.post(f"{w.PREFIX}/heir", self._heir),
                web.get(f"{w.PREFIX}/state", self._state),
                web.get(f"{w.PREFIX}/events", self._events),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/", page.serve),
            ]
        )
        return app

    async def _join(self, request: web.Request) -> web.Response:
        answer = self.control.join(await self._read(request, w.Join), time.monotonic())
        await self._save()  # an epoch that an agent goes by is never given again, whatever happens to this process
        return _answer(answer)

    async def _report(self, request: web.Request) -> web.Response:
        return _answer(self.control.report(await self._read(request, w.Report), time.monotonic()))

    async def _leave(self, request: web.Request) -> web.Response:
        return _answer(self.control.leave(await self._read(request, w.Leave), time.monotonic()))

    async def _whereis(self, request: web.Request) -> web.Response:
        return _answer(self.control.whereis(await self._read(request, w.WhereIs)))

    async def _heir(self, request: web.Request) -> web.Response:
        return _answer(self.control.heir(await self._read(request, w.Empty)))

    async def _state(self, request: web.Request) -> web.Response:
        made, body = self._shown
        now = time.monotonic()
        if now - made > 0.5:  # many who look cost no more than one
            state = showing.show(self.control, now, now - self._started, self.decision_seconds() * 1e3)
            body = msgspec.json.encode(state)
            self._shown = (now, body)
        return web.Response(body=body, content_type=_JSON, headers={"Cache-Control": "no-store"})

    async def _events(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not after.isdecimal() or len(after) > 18:
            return _answer(w.Refusal("malformed", "after is not a number"))
        events = [event for event in self.control.events if event.id > int(after)]
        return web.Response(body=msgspec.json.encode(events), content_type=_JSON)

    async def _metrics(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        state = showing.show(self.control, now, now - self._started, self.decision_seconds() * 1e3)
        return web.Response(body=exposition(state), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _read(self, request: web.Request, kind: type[Message]) -> Message:
        async with asyncio.timeout(_BODY_SECONDS):
            body = await request.read()
        return msgspec.json.decode(body, type=kind)


@asynccontextmanager
async def stand_by(settings: ManagerSettings, secret: str) -> AsyncIterator[int]:
    """Meanwhile everybody is told that another manager serves; the port that was taken.

    Raises:
        OSError: the address is taken or not this machine's.
    """
    app = web.Application(middlewares=[_guarded(secret, lambda: False)])
    async with _listening(app, settings) as port:
        yield port


@asynccontextmanager
async def _listening(app: web.Application, settings: ManagerSettings) -> AsyncIterator[int]:
    runner = web.AppRunner(app, access_log=None, handle_signals=False, keepalive_timeout=75.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, ssl_context=settings.tls(), backlog=4096).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _answer(message: msgspec.Struct) -> web.Response:
    status = _STATUS.get(message.kind, 400) if isinstance(message, w.Refusal) else 200
    return web.Response(body=msgspec.json.encode(message), status=status, content_type=_JSON)


_OPEN = ("/", "/healthz")
"""What may be had without the token: the empty page, and whether anybody is there."""


def _guarded(secret: str, leads: Callable[[], bool]):
    """Let in who knows the token, and turn whatever goes wrong into a refusal that gives nothing away."""
    strangers = 0

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        nonlocal strangers
        if request.path not in _OPEN:
            scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
            if scheme != "Bearer" or not token.equal(shown, secret):
                strangers += 1
                if strangers & (strangers - 1) == 0:  # the 1st, 2nd, 4th, 8th: seen without flooding the log
                    log.warning("%d requests without the token so far, the last from %s", strangers, request.remote)
                return _answer(w.Refusal("token", "no such token"))
            if not leads():
                return _answer(w.Refusal("standby", "another manager leads: ask that one"))
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _answer(w.Refusal("oversized", f"more than {w.MOST_BYTES} bytes"))
        except web.HTTPException as refusal:
            answer = w.Refusal("malformed", refusal.reason)
            return web.Response(body=msgspec.json.encode(answer), status=refusal.status, content_type=_JSON)
        except msgspec.MsgspecError as error:
            return _answer(w.Refusal("malformed", str(error)))
        except TimeoutError:
            return _answer(w.Refusal("malformed", "the body did not come"))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:  # noqa: BLE001 - one request's trouble must not end everybody's manager
            log.exception("a request to %s could not be handled", request.path)
            return _answer(w.Refusal("failed", "the manager's log says more"))

    return guard
