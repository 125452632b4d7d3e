"""The wheel builds in isolation and works where nothing but its own dependencies is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "native", "cmake", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources by pip, in an environment that pip makes for it."""
    source = tmp_path_factory.mktemp("source")
    built = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        found = ROOT / name
        if found.is_dir():
            leave = shutil.ignore_patterns("__pycache__", "_native*")
            shutil.copytree(found, source / name, ignore=leave)
        elif found.exists():
            shutil.copy(found, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(built), str(source)]
    subprocess.run(command, check=True)
    (found,) = built.glob("*.whl")
    return found


def test_it_holds_what_it_should(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert any(name.startswith("zerostall/_native.") and name.endswith(".so") for name in names)
    assert {"zerostall/_native.pyi", "zerostall/py.typed", "zerostall/errors.py"} <= names
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "native/", "benchmarks/"))]


def test_it_imports_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    code = """
import importlib.util, sys
import zerostall, zerostall.agent
from zerostall import native
assert native.crc32c(b"123456789") == 0xE3069283
assert importlib.util.find_spec("torch") is None
assert importlib.util.find_spec("numpy") is None
print(sorted(zerostall.__all__))
"""
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Checkpointer" in done.stdout
