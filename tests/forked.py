"""`python -c CODE`, `python -m MODULE` and agents for milliseconds: forked from a process that has loaded everything.

Processes of their own in all that matters to most tests: memory, environment, descriptors, how they end. What happens
as an interpreter starts or modules are imported, and limits and libraries that hold from then on, need a real start.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from crash.nursery import Child, Nursery
from zerostall.wire import rendezvous

_PLAIN = dict(os.environ)
_open: list[Nursery] = []


@functools.cache
def _nursery(kind: str) -> Nursery:
    _open.append(Nursery(kind, _PLAIN))
    return _open[-1]


def python(
    *words: object, environment: Mapping[str, str] | None = None, seconds: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with these words until it ends, in this process's environment if none is given."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        child = start(*words, environment=environment, output=output, errors=errors)
        code = child.wait(seconds)
        return subprocess.CompletedProcess(child.words, code, output.read_text(), errors.read_text())


def start(*words: object, environment: Mapping[str, str] | None = None, output: Path, **files: Path | None) -> Child:
    """Start it and return. More of `files` as `Nursery.start` takes them."""
    environment = os.environ if environment is None else environment
    return _nursery("python").start(*words, environment=environment, output=output, **files)


def cli(environment: Mapping[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """The command line, as a user calls it."""
    return python("-m", "zerostall.cli", *words, environment=environment)


def launch(folder: Path) -> int:
    """What `zerostall.wire.rendezvous` does to start an agent, which is detached: nobody's child."""
    words = ("--detach", "--runtime-dir", folder)
    log = rendezvous.log_path(folder)
    return _nursery("agent").start(*words, environment=os.environ, output=log, folder=Path("/")).wait()


def close() -> None:
    """At the end of all tests."""
    while _open:
        _open.pop().close()
    _nursery.cache_clear()
