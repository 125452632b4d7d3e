"""The native tests under ThreadSanitizer; their long form under AddressSanitizer with UBSan, too."""

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


def reason_against(sanitizers: str, folder: Path) -> str:
    """Why nothing can be tried under them here: a runtime that is not installed, or that this kernel keeps out."""
    (folder / "empty.cpp").write_text("int main() { return 0; }")
    for command in (["c++", f"-fsanitize={sanitizers}", "empty.cpp", "-o", "empty"], ["./empty"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"no -fsanitize={sanitizers} here: {done.stderr[-300:]}"
    return ""


@pytest.mark.timeout(3600)  # a build and all tests, on a machine that does other things, too
@pytest.mark.skipif(not (have("cmake") and have("ninja") and have("c++")), reason="needs cmake, ninja and a compiler")
@pytest.mark.parametrize("sanitizers", [pytest.param("address,undefined", marks=pytest.mark.long), "thread"])
def test_native_tests_are_clean(sanitizers: str, tmp_path: Path) -> None:
    if why := reason_against(sanitizers, tmp_path):
        pytest.skip(why)

    def run(*command: str, check: bool = True) -> bool:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PATH": TOOLS})
        assert done.returncode == 0 or not check, done.stdout[-20_000:] + done.stderr[-20_000:]
        return done.returncode == 0

    def configure(whole: str) -> None:
        options = [f"-DCMAKE_UNITY_BUILD={whole}", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", "-DZEROSTALL_TESTS=ON"]
        run("cmake", "-S", str(ROOT), "-B", ".", "-G", "Ninja", *options, f"-DZEROSTALL_SANITIZE={sanitizers}")

    # Several files at a time are one to the compiler: headers are what takes it longest. Where a name stands in two
    # of them, each has its turn.
    configure("ON")
    if not run("ninja", check=False):
        print("several files at a time do not compile")
        configure("OFF")
        run("ninja")
    run("ctest", "--output-on-failure", "--no-tests=error", f"--parallel={os.cpu_count()}")
