"""Exports that are killed leave partial files; the next one to the same place removes them, and no other's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zerostall
from zerostall.flow.new_file import new_file
from zerostall.flow.new_folder import moved_in, new_folder


def killed(act: Callable[[], None]) -> None:
    """Do it in a child that is killed at its end."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def partials(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".partial"))


def test_what_a_killed_export_left_goes_with_the_next(tmp_path: Path) -> None:
    source, run, out = tmp_path / "in.safetensors", tmp_path / "run", tmp_path / "out.safetensors"
    save_file({"w": np.arange(3, dtype=np.float32)}, source)
    zerostall.import_file(source, run, 1)

    def half(path: Path) -> None:
        with new_file(path, overwrite=False) as file:
            file.write(b"half")
            die()

    for path in (out, out, tmp_path / "another.safetensors"):
        killed(lambda: half(path))
    (tmp_path / ".out.safetensors.mine.partial").write_text("of somebody else")
    assert len(partials(tmp_path)) == 3  # the second of `out` has removed the first
    zerostall.export(run, 1, out)
    assert load_file(out)["model.w"].tolist() == [0, 1, 2]
    (of_another, mine) = partials(tmp_path)
    assert of_another.startswith(".another.safetensors.") and mine == ".out.safetensors.mine.partial"


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_file(out, overwrite=True) as first:
        first.write(b"first")
        with new_file(out, overwrite=True) as second:
            second.write(b"second")
            assert len(partials(tmp_path)) == 2
    assert out.read_bytes() == b"first" and partials(tmp_path) == []


@pytest.mark.parametrize("way", ["files", "moved"])
def test_a_folder_is_swept_of_its_own_files(tmp_path: Path, way: str) -> None:
    out = tmp_path / "hub"

    def write(end: Callable[[], None]) -> None:
        def ours(name: str) -> bool:
            return name in ("a", "b")

        if way == "files":
            with new_folder(out, overwrite=True, nbytes=0, ours=ours) as folder:
                for name in ("a", "b"):
                    with folder.file(name) as file:
                        file.write(name.encode())
                        end()
        else:
            with moved_in(out, overwrite=True, nbytes=0, ours=ours, last="b") as beside:
                (beside / "a").write_text("a")
                end()
                (beside / "b").write_text("b")

    killed(lambda: write(die))
    assert partials(out if way == "files" else tmp_path)
    (out / ".config.json.0123abcd.partial").write_text("of somebody else")
    write(lambda: None)
    assert partials(out) == [".config.json.0123abcd.partial"] and partials(tmp_path) == []
    assert [(out / name).read_text() for name in ("a", "b")] == ["a", "b"]
