"""The manager as a process: open the store, serve, leave when told."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import signal
from typing import TYPE_CHECKING

from zerostall.errors import RunBusyError
from zerostall.manager.service import Service
from zerostall.manager.store import Store
from zerostall.telemetry import log
from zerostall.wire import token

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerostall.manager.settings import ManagerSettings


def run(settings: ManagerSettings, ready: Callable[[int], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        RunBusyError: another manager has the state folder.
        StorageError, CapabilityError: the state or the token cannot be used.
        OSError: the address is taken.
    """
    # What is known of thousands of nodes lives long and forms no cycles; a full collection of it holds up decisions.
    gc.set_threshold(50_000, 20, 100)
    settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _lock(settings.state)
    try:
        token.make(settings.token_file)
        store = Store(settings.state / "manager.sqlite")
        try:
            service = Service(settings, store, token.read(settings.token_file))
            if not settings.loopback and settings.certificate is None:
                log.warning("%s is reached without TLS: whoever sees the traffic sees the token", settings.host)
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(_until_told(service, ready))
        finally:
            store.close()
    finally:
        os.close(lock)


async def _until_told(service: Service, ready: Callable[[int], None]) -> None:
    serving = asyncio.create_task(service.serve(ready))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    await serving


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
