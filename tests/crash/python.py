"""What the interpreter does with `-c CODE …` and `-m MODULE …`, in a process that has torch and zerostall loaded.

It ends as any other: threads are waited for, what was registered for the end is done. Only modules are not taken apart,
which takes longer than most of what is run here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import threading
import traceback
import types
from typing import NoReturn

import torch

import zerostall.cli.app
import zerostall.manager.service
import zerostall.trainer.checkpointer
import zerostall.trainer.exchange.loading  # noqa: F401 - everything is loaded before the fork


def main(words: list[str]) -> NoReturn:
    if threads := os.environ.get("OMP_NUM_THREADS"):  # torch has looked before
        torch.set_num_threads(int(threads))
    code = 0
    try:
        run(*words)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(code)


def run(option: str, what: str, *rest: str) -> None:
    if option == "-c":
        program = types.ModuleType("__main__")
        sys.argv, sys.modules["__main__"] = ["-c", *rest], program
        exec(compile(what, "<string>", "exec"), program.__dict__)
    elif option == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        raise ValueError(f"{option} is neither -c nor -m")
