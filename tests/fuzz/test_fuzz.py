"""The fuzzer's targets: on their seeds and what was found before, in a short form without it, and in the long form."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.targets import TARGETS

TESTS = Path(__file__).parents[1]
FOUND = Path(__file__).parent / "found"
FAST = {
    "manifest",
    "record",
    "layout",
    "cut-layout",
    "run",
    "values",
    "name",
    "header",
    "from-trainer",
    "from-agent",
}  # no files
LONG_SECONDS = 60

pytestmark = pytest.mark.filterwarnings("ignore")
every_target = pytest.mark.parametrize("name", TARGETS)


def mutated(data: bytes, luck: random.Random) -> bytes:
    """A few changes: bits, bytes, pieces cut out, doubled or moved, numbers at their limits."""
    changed = bytearray(data)
    for _ in range(luck.randint(1, 4)):
        at = luck.randint(0, len(changed))
        piece = changed[at : at + luck.randint(1, 16)]
        match luck.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << luck.randrange(8)
            case 1:
                del changed[at : at + len(piece)]
            case 2:
                changed[at:at] = piece
            case 3:
                changed[at:at] = luck.choice(
                    [b"-1", b"18446744073709551616", b"1e999", b"null", b"[[", b"\xff\xfe", b'"']
                )
            case 4:
                changed[at : at + len(piece)] = luck.randbytes(len(piece))
            case _:
                other = luck.randint(0, len(changed))
                changed[other:other] = piece
    return bytes(changed)


@every_target
def test_seeds_and_some_changes_of_them(name: str) -> None:
    target = TARGETS[name]
    luck = random.Random(name)
    for seed in target.seeds:
        target.run(seed)
        for _ in range(300 if name in FAST else 20):
            target.run(mutated(seed, luck))


@every_target
def test_what_was_found_before(name: str) -> None:
    for path in sorted((FOUND / name).glob("*")):
        TARGETS[name].run(path.read_bytes())


@pytest.mark.long
@pytest.mark.timeout(LONG_SECONDS + 240)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris: `make fuzz` installs it")
@every_target
def test_with_coverage_as_a_guide(name: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.run", name, f"--seconds={LONG_SECONDS}", f"--corpus={tmp_path}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
