"""When files go straight to a device: the choice as a table, and what each refusal leads to."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from standin.cufile import NOT_SUPPORTED, FakeCuFile
from zerostall import config, telemetry
from zerostall.cli import doctor, nvidia
from zerostall.config import Gds
from zerostall.core import gds
from zerostall.core.gds import Choice, Found
from zerostall.flow import straight
from zerostall.native import Device

THERE, P2P, COMPAT, NONE = Found(nvfs=(2, 17)), Found(p2p=True), Found(), Found(problem="no libcufile")


@pytest.mark.parametrize(
    ("setting", "found", "use", "fallback"),
    [
        ("auto", THERE, True, False),
        ("auto", P2P, True, False),
        ("auto", COMPAT, False, False),
        ("auto", NONE, False, False),
        ("on", THERE, True, False),
        ("on", COMPAT, True, True),
        ("on", NONE, False, True),
        ("off", THERE, False, False),
    ],
)
def test_the_choice(setting: Gds, found: Found, use: bool, fallback: bool) -> None:
    chosen = gds.choose(setting, found)
    assert chosen == Choice(use, chosen.reason, fallback) and chosen.reason


def test_advice() -> None:
    assert "/run/udev" in gds.advice("cuFile refuses the file: file descriptor is not registered (5027)")
    assert not gds.advice("not supported on current file (5008)")


def test_wheels_are_looked_into() -> None:
    assert gds.libraries(["", "/site"])[:3] == [
        "libcufile.so.0",
        "/usr/local/cuda/lib64/libcufile.so.0",
        "/site/nvidia/cu13/lib/libcufile.so.0",
    ]


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.gds() == "auto"
    monkeypatch.setenv("ZEROSTALL_GDS", "yes")
    with pytest.raises(ValueError, match="auto, on, off"):
        config.gds()


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_said", {})


@pytest.mark.usefixtures("unsaid")
def test_a_refused_file_is_counted(
    cufile: FakeCuFile, device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"x" * 4096)
    caplog.set_level(logging.WARNING, "zerostall")
    with path.open("rb") as file:
        assert straight.device_file(device, file.fileno(), path) is not None
        for _ in range(2):
            cufile.fail("cuFileHandleRegister", 1, NOT_SUPPORTED)
            assert straight.device_file(device, file.fileno(), path) is None
    assert [fallback.count for fallback in telemetry.fallbacks()] == [2]
    assert caplog.text.count("not supported on current file") == 1


@pytest.mark.usefixtures("cufile")
def test_off_asks_nobody(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSTALL_GDS", "off")
    assert straight.device_file(device, -1, tmp_path) is None


def doctors(monkeypatch: pytest.MonkeyPatch, where: Path) -> dict[str, tuple[str, str]]:
    monkeypatch.setattr(nvidia, "driver", lambda: "580.1")
    monkeypatch.setattr(nvidia, "devices", lambda: (["Stand-in"], ""))
    return {found.name: (found.verdict, found.detail) for found in doctor.examine(where)}


@pytest.mark.usefixtures("own_agent")
def test_doctor_tells(cufile: FakeCuFile, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctors(monkeypatch, tmp_path)["GPU storage"] == (
        "yes",
        "files go straight to a GPU, and with peer=True saves straight from one to disk: nvidia-fs 2.17",
    )
    cufile.fail("cuFileHandleRegister", 1, NOT_SUPPORTED)
    verdict, detail = doctors(monkeypatch, tmp_path)["GPU storage"]
    assert verdict == "limited" and "through host memory" in detail and "(5008)" in detail
    monkeypatch.setenv("ZEROSTALL_GDS", "off")
    assert "switched off" in doctors(monkeypatch, tmp_path)["GPU storage"][1]


def test_what_is_wanted_and_not_there_is_said(driver: Path) -> None:
    code = "from zerostall.flow import straight; from zerostall import native; straight.choice(native.Device(0))"
    environment = {**os.environ, "ZEROSTALL_LIBCUDA": str(driver), "ZEROSTALL_LIBCUFILE": "nothing.so"}
    environment |= {"ZEROSTALL_GDS": "on", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "ZEROSTALL_GDS=on, but cuFile cannot be opened" in done.stderr
