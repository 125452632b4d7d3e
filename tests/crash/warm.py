"""A process that has imported everything once and forks a fresh child whenever it is asked to.

Run as a script: `warm.py KIND`, one of MODULES. A line of JSON in gives a line of JSON out:

    {"start": [words], "environment": {...}, "source": path, "output": path, "errors": path,
     "folder": path, "umask": n}
                     ->  {"pid": n}      the child runs `main(words)`
    {"look": pid}    ->  {"code": n} once it has ended, else {"code": null}

The child is an ordinary Python program from then on: it ends like one, with everything that is to happen at its end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys

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


program = importlib.import_module(MODULES[sys.argv[1]])
# No child's collector walks through what all have in common: with torch that is half a second as each of them ends.
gc.collect()
gc.freeze()
print("{}", flush=True)
words = next_child()
if words is not None:
    sys.exit(program.main(words))
