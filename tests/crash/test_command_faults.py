"""The disk refuses what a command writes: a clear error, nothing half there, all as it was; later it works."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import zerostall
from crash.nursery import Nursery
from shim.faults import Faults, Shim
from zerostall.core.exchange import ImportOptions

Run = Callable[..., tuple[int, str]]

# What is written, and by which words; RUN, OUT and SOURCE stand for places.
COMMANDS: dict[str, tuple[str, ...]] = {
    "safetensors": ("export", "RUN", "2", "OUT/o.safetensors"),
    "over": ("export", "RUN", "2", "OUT/there.safetensors", "--overwrite"),
    "pt": ("export", "RUN", "2", "OUT/o.pt"),
    "huggingface": ("export", "RUN", "2", "OUT/hub", "--shard-size", "30000"),
    "hub over": ("export", "RUN", "2", "OUT/old hub", "--shard-size", "30000", "--overwrite"),
    "dcp": ("export", "RUN", "2", "OUT/dcp", "--format", "dcp"),
    "import": ("import", "SOURCE", "RUN", "--step", "3"),
    "replace": ("import", "SOURCE", "RUN", "--step", "2", "--replace"),
    "new run": ("import", "SOURCE", "OUT/run", "--step", "3"),
    "pin": ("pin", "RUN", "2"),
}
FAULTS = [("open", "ENOSPC"), ("open", "EACCES"), ("write", "EIO"), ("write", "ENOSPC"), ("fsync", "EIO")]


@pytest.fixture(scope="module")
def commands(faulty: Shim) -> Iterator[Nursery]:
    with contextlib.closing(Nursery("python", faulty.environment())) as nursery:
        yield nursery


@pytest.fixture
def run(commands: Nursery, faulty: Shim, tmp_path: Path) -> Run:
    """Runs a command that obeys `faulty`: its exit status, and what it printed."""
    numbers = itertools.count()
    environment = {**faulty.environment(), "ZEROSTALL_RUNTIME_DIR": str(tmp_path / "no agent")}

    def run(*words: str | Path) -> tuple[int, str]:
        output = tmp_path / f"printed-{next(numbers)}"
        child = commands.start("-m", "zerostall.cli", *words, environment=environment, output=output)
        code = child.wait()
        text = child.printed()
        assert "Traceback" not in text, text
        return code, text

    return run


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A run of two steps, a folder with files of before, and a file to import."""
    places = {"RUN": tmp_path / "run", "OUT": tmp_path / "out", "SOURCE": tmp_path / "in.safetensors"}
    places["OUT"].mkdir()
    for step in (1, 2):
        save_file({"w": np.full(5000, step, np.float32), "b": np.full(5000, -step, np.float32)}, places["SOURCE"])
        zerostall.import_file(places["SOURCE"], places["RUN"], step, ImportOptions())
    (places["OUT"] / "there.safetensors").write_bytes(places["SOURCE"].read_bytes())
    zerostall.export(places["RUN"], 1, places["OUT"] / "old hub", zerostall.ExportOptions(shard_size=30000))
    return places


def words(name: str, places: dict[str, Path]) -> list[str]:
    made = []
    for word in COMMANDS[name]:
        first, slash, rest = word.partition("/")
        made.append(str(places[first]) + slash + rest if first in places else word)
    return made


def files(*folders: Path) -> dict[str, str]:
    """Every file there is, and what is in it; folders too. A layout may stay: it belongs to no step."""
    found: dict[str, str] = {}
    for path in (one for folder in folders for one in folder.rglob("*")):
        if path.parent.name != "layouts" and path.name != "run.lock":
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"
    return found


@pytest.mark.parametrize(("op", "error"), FAULTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_disk_refuses_leaves_all_as_it_was(
    run: Run, faulty: Shim, places: dict[str, Path], name: str, op: str, error: str
) -> None:
    if name == "pin" and op == "write":
        pytest.skip("the mark is an empty file")
    target = places["RUN" if name in ("import", "replace", "pin") else "OUT"]
    # What is only looked at, or taken to keep others out, is no file that is written.
    match = f"{target}/*/*" if name in ("import", "replace", "pin", "new run") else f"{target}/*"
    struck, nth = 0, 0
    before = files(places["RUN"], places["OUT"])
    copies = {place: places["RUN"].with_name(f"{place} before") for place in ("RUN", "OUT")}
    for place, copy in copies.items():
        shutil.copytree(places[place], copy)
    while True:  # the first such call, the second, and so on
        nth += 1
        with Faults(faulty, op=op, match=match, error=error, nth=nth, times=1) as fault:
            code, text = run(*words(name, places))
        if fault.hits < nth:
            break
        if code == 0:  # it only looked, and knows another way
            for place, copy in copies.items():
                shutil.rmtree(places[place])
                shutil.copytree(copy, places[place])
            continue
        struck += 1
        assert code == 1, text
        assert text.startswith("StorageError: "), text
        assert os.strerror(getattr(errno, error)) in text and str(places[target.name.upper()]) in text, text
        left = files(places["RUN"], places["OUT"])
        for begun in ("run", "run/run.json", "run/layouts"):  # a run that has no step yet
            left.pop(str(places["OUT"] / begun), None)
        if name == "new run" and left != before:
            # Of the folder, behind the manifest: the step is there and whole, though nobody can say that it lasts.
            assert [verdict.clean for verdict in zerostall.verify(places["OUT"] / "run")] == [True]
            shutil.rmtree(places["OUT"] / "run")
            continue
        assert left == before, f"call {nth}"
    assert struck
    assert code == 0, text
    assert all(verdict.clean for verdict in zerostall.verify(places["RUN"]))


@pytest.mark.parametrize("name", ["safetensors", "pt", "huggingface", "import"])
def test_a_disk_that_takes_a_little_at_a_time_takes_all(
    run: Run, faulty: Shim, places: dict[str, Path], name: str
) -> None:
    written = []
    for part in ("at once", "bit by bit"):
        (folder := places["OUT"] / part).mkdir()
        with Faults(faulty, op="write", match=f"{places['RUN'].parent}/*", short=1000) as fault:
            if part == "at once":
                fault.lift()
            assert run(*words(name if name != "import" else "new run", {**places, "OUT": folder}))[0] == 0
        there = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]
        written.append({path.relative_to(folder): path.read_bytes() for path in there})
    assert written[0] == written[1] != {}
    if name == "import":
        assert zerostall.verify(places["OUT"] / "bit by bit" / "run", 3)[0].clean
