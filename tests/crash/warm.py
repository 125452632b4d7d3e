"""A process that has imported everything once and forks a fresh child whenever it is asked to.

Run as a script: `warm.py agent` or `warm.py trainer`. A line of JSON in gives a line of JSON out:

    {"start": [words], "environment": {...}, "output": path}   ->  {"pid": n}      the child runs `main(words)`
    {"look": pid}                                              ->  {"code": n} once it has ended, else {"code": null}

The child is an ordinary Python program from then on: it ends like one, with everything that is to happen at its end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

MODULES = {"agent": "zerostall.agent.__main__", "trainer": "crash.trainer", "rank": "ranks.program"}


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
                become(request["environment"], request["output"])
                return request["start"]
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    return None


def become(environment: dict[str, str], output: str) -> None:
    """Take on a child's environment, and have all it prints appended to a file."""
    os.environ.clear()
    os.environ.update(environment)
    printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(fd, target)
    os.close(printed)
    os.close(nothing)
    os.setsid()


program = importlib.import_module(MODULES[sys.argv[1]])
print("{}", flush=True)
words = next_child()
if words is not None:
    sys.exit(program.main(words))
