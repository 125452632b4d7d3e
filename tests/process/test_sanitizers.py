"""The native tests under AddressSanitizer with UBSan, and under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Those of this environment come first: a system's own cmake may be too old.
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def have(tool: str) -> bool:
    return shutil.which(tool, path=TOOLS) is not None


@pytest.mark.long
@pytest.mark.timeout(3600)  # a build and all tests, on a machine that does other things, too
@pytest.mark.skipif(not (have("cmake") and have("ninja") and have("c++")), reason="needs cmake, ninja and a compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_native_tests_are_clean(sanitizers: str, tmp_path: Path) -> None:
    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PATH": TOOLS})
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]

    options = ["-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", "-DZEROSTALL_TESTS=ON", f"-DZEROSTALL_SANITIZE={sanitizers}"]
    run("cmake", "-S", str(ROOT), "-B", ".", "-G", "Ninja", *options)
    run("ninja")
    run("ctest", "--output-on-failure", "--no-tests=error")
