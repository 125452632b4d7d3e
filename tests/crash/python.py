"""What the interpreter does with `-c CODE …` and `-m MODULE …`, in a process that has torch and zerostall loaded."""

from __future__ import annotations

import os
import runpy
import sys
import types

import torch

import zerostall.cli.app
import zerostall.manager.service
import zerostall.trainer.checkpointer
import zerostall.trainer.exchange.loading  # noqa: F401 - everything is loaded before the fork


def main(words: list[str]) -> int:
    if threads := os.environ.get("OMP_NUM_THREADS"):  # torch has looked before
        torch.set_num_threads(int(threads))
    run(*words)
    return 0


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
