"""Several interpreters in one process: only the main one may use what is native."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
if sys.argv[1] == "loaded":
    import zerostall.native
within = '''
import zerostall
for look in (lambda: zerostall.snapshots("run"), lambda: zerostall.Checkpointer("run", a=1)):
    try:
        look()
    except ImportError as error:
        print(error, flush=True)
'''
other = interpreters.create()
interpreters.run_string(other, within)
"""


@pytest.mark.parametrize("first", ["loaded", "not loaded"])
def test_another_interpreter_is_told_so(first: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, first], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("zerostall works in the main interpreter only") == 2, done.stdout + done.stderr
