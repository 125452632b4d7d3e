"""The manager as a process: open the store, serve, leave when told. Of several with one etcd, one serves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import gc
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from zerostall.errors import RunBusyError, StorageError
from zerostall.manager.election import campaign
from zerostall.manager.etcd_store import EtcdStore
from zerostall.manager.service import Service, stand_by
from zerostall.manager.store import Store
from zerostall.telemetry import log
from zerostall.wire import token

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerostall.manager.etcd import Place
    from zerostall.manager.settings import ManagerSettings


def run(settings: ManagerSettings, ready: Callable[[int], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT; where others serve already, when none of them does any more.

    Raises:
        RunBusyError: another manager has the state folder.
        StorageError, CapabilityError: the state or the token cannot be used.
        OSError: the address is taken.
    """
    # What is known of thousands of nodes lives long and forms no cycles; a full collection of it holds up decisions.
    gc.set_threshold(50_000, 20, 100)
    # While images are placed anew on another thread, the loop asks for the interpreter after every system call.
    sys.setswitchinterval(0.0005)
    token.make(settings.token_file)
    secret = token.read(settings.token_file)
    if not settings.loopback and settings.certificate is None:
        log.warning("%s is reached without TLS: whoever sees the traffic sees the token", settings.host)
    with contextlib.suppress(asyncio.CancelledError):
        if settings.store is not None:
            asyncio.run(_among_others(settings, settings.store, secret, ready))
        else:
            _alone(settings, secret, ready)


def _alone(settings: ManagerSettings, secret: str, ready: Callable[[int], None]) -> None:
    settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _lock(settings.state)
    try:
        store = Store(settings.state / "manager.sqlite")
        try:
            asyncio.run(_until_told(Service(settings, store, secret), ready))
        finally:
            store.close()
    finally:
        os.close(lock)


async def _until_told(service: Service, ready: Callable[[int], None]) -> None:
    serving = asyncio.create_task(service.serve(ready))
    _on_signals(serving.cancel)
    await serving


async def _among_others(settings: ManagerSettings, place: Place, secret: str, ready: Callable[[int], None]) -> None:
    loop, stopping = asyncio.get_running_loop(), threading.Event()
    serving: asyncio.Task[None] | None = None

    def stop() -> None:
        stopping.set()
        step_down()

    def step_down() -> None:
        if serving is not None:
            serving.cancel()

    _on_signals(stop)
    while not stopping.is_set():
        async with stand_by(settings, secret) as port:
            if settings.port != port:
                settings = dataclasses.replace(settings, port=port)
            ready(port)
            ready = _say_nothing
            leadership = await asyncio.to_thread(
                campaign,
                place,
                settings.store_authorities,
                f"{settings.host}:{port}",
                lambda: loop.call_soon_threadsafe(step_down),
                stopping,
            )
        if leadership is None:
            return
        store = EtcdStore(place, settings.store_authorities, leadership)
        try:
            service = await asyncio.to_thread(Service, settings, store, secret, leadership.holds)
            serving = asyncio.create_task(service.serve())
            if stopping.is_set() or not leadership.holds():
                serving.cancel()
            await serving
        except asyncio.CancelledError:
            log.info("leads no longer")
        except StorageError as error:
            log.warning("leads no longer: %s", error.args[0])
        finally:
            serving = None
            await asyncio.to_thread(leadership.resign)
            store.close()


def _on_signals(act: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act)


def _say_nothing(port: int) -> None:
    pass


def _lock(folder: Path) -> int:
    lock = os.open(folder / "manager.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RunBusyError(
            f"another manager runs with {folder}", hint="end that one first, or give this one another --state"
        ) from None
    return lock
