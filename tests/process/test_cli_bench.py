"""`zerostall bench disk`: tells rates, leaves nothing, says what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from forked import cli


def bench(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = cli(os.environ, "bench", "disk", *words)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done


def test_rates_of_a_folder(tmp_path: Path) -> None:
    found = json.loads(bench(tmp_path, "--size", "20MiB", "--rounds", "1", "--json").stdout)
    assert found["nbytes"] == 16 << 20 and found["folder"] == str(tmp_path)
    assert found["write"]["rate"] > 0 and found["read"]["processor"] >= 0
    assert (found["bare_write"] is None) == (found["bare_read"] is None) == (found["read_share"] is None)
    if share := found["write_share"]:
        assert 0 < share["low"] <= share["median"] <= share["high"]
    assert not list(tmp_path.iterdir())
    told = bench(tmp_path, "--size", "16MiB", "--rounds", "1").stdout
    assert "GB/s" in told and "write and fsync" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no procfs or devices")
def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    assert "no room for the files" in bench(tmp_path, "--size", "900TiB", code=1).stderr
    assert (
        "cannot write"
        in bench("/proc", "--size", "16MiB", code=1).stderr
        + bench(tmp_path / "missing", "--size", "16MiB", code=1).stderr
    )
