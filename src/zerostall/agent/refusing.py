"""What a trainer hears when what it asked for cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.errors import AgentError, StorageError, ZerostallError
from zerostall.telemetry import log

if TYPE_CHECKING:
    from pathlib import Path


def ours(error: Exception, where: Path | str) -> ZerostallError:
    """Return the error as one of ours; what nobody expected goes to the log with its trace."""
    if isinstance(error, ZerostallError):
        return error
    if isinstance(error, OSError):
        return StorageError(f"cannot read from {where}: {error.strerror or error}", errno=error.errno)
    log.exception("%s: could not be read", where)
    return AgentError(f"the agent could not read from {where}: {error!r}", hint="the agent's log says more")
