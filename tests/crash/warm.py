"""A process that has imported everything once and forks a fresh child whenever it is asked to.

Run as a script: `warm.py KIND`, one of MODULES. A line of JSON in gives a line of JSON out:

    {"start": [words], "environment": {...}, "source": path, "output": path, "errors": path,
     "folder": path, "umask": n}
                     ->  {"pid": n}      the child runs `main(words)`
    {"look": pid}    ->  {"code": n} once it has ended, else {"code": null}

The child is an ordinary Python program from then on, and ends like one. Only where tests do not look at endings are
modules not taken apart: that takes longer than most of what is run here.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

LOOKED_AT = ("agent", "trainer")
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
MODULES = {
    "agent": "zerostall.agent.__main__",
    "trainer": "crash.trainer",
    "rank": "ranks.program",
    "python": "crash.python",
}


def next_child() -> list[str] | None:
    """Answer requests. Returns in each child what it is to do, and in this process None when all is over."""
    for line in sys.stdin:
        request = json.loads(line)
        if "look" in request:
            pid, status = os.waitpid(request["look"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                become(request)
                return request["start"]
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    return None


def become(request: dict) -> None:
    """Take on a child's environment and folder, and have all it prints appended to files."""
    os.environ.clear()
    os.environ.update(request["environment"])
    for target, (name, flags) in enumerate((("source", os.O_RDONLY), ("output", APPEND), ("errors", APPEND))):
        fd = os.open(request[name], flags, 0o600)
        os.dup2(fd, target)
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.setsid()
    if torch := sys.modules.get("torch"):
        # Its pool of threads did not come along. Were this left to the threads of the first backward, two of them might
        # make it anew at once, and torch ends the process ("Invalid thread pool!", seen with 2.14).
        torch.set_num_threads(torch.get_num_threads())


def exit_as_ever(main: Callable[[list[str]], int], words: list[str]) -> NoReturn:
    sys.exit(main(words))


def exit_soon(main: Callable[[list[str]], int], words: list[str]) -> NoReturn:
    """Threads are waited for and what was registered for the end is done, as ever; then it ends."""
    code: object = 1
    try:
        code = main(words)
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


program = importlib.import_module(MODULES[sys.argv[1]])
# No child's collector walks through what all have in common: with torch that is half a second as each of them ends.
gc.collect()
gc.freeze()
end = exit_as_ever if sys.argv[1] in LOOKED_AT else exit_soon
print("{}", flush=True)
words = next_child()
if words is not None:
    end(program.main, words)
