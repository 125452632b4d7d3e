"""Which way images go from agent to agent, and what becomes of it where that cannot be had."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from zerostall import config
from zerostall.agent import transports
from zerostall.agent.nixl import load
from zerostall.cli import doctor
from zerostall.core.transports import Choice, Found, choose, ucx_settings
from zerostall.errors import CapabilityError

NOTHING = Found("NIXL is not installed")
RDMA = Found("", ("mlx5_0", "mlx5_1"))


@pytest.mark.parametrize(
    ("setting", "found", "nixl", "reason"),
    [
        ("tcp", RDMA, False, "ZEROSTALL_TRANSPORT says so"),
        ("auto", RDMA, True, "RDMA by mlx5_0, mlx5_1"),
        ("auto", Found(), False, "no RDMA device"),
        ("auto", Found("NIXL is not installed", ("mlx5_0",)), False, "RDMA by mlx5_0, but NIXL is not installed"),
        ("nixl", Found(), True, "UCX over TCP"),
        ("nixl", RDMA, True, "RDMA by mlx5_0, mlx5_1"),
        ("shm", RDMA, True, "shared memory"),
    ],
)
def test_the_choice_says_why(setting: config.Transport, found: Found, nixl: bool, reason: str) -> None:
    choice = choose(setting, found)
    assert choice.nixl == nixl and reason in choice.reason


def test_what_is_asked_for_and_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match="NIXL is not installed") as caught:
        choose("nixl", NOTHING)
    assert "pip install" in caught.value.hint
    monkeypatch.setattr(transports, "found", lambda: NOTHING)
    with pytest.raises(CapabilityError):
        transports.open_transport("nixl", "n1", "127.0.0.1")
    monkeypatch.setenv("ZEROSTALL_TRANSPORT", "nixl")
    finding = doctor.between_nodes()
    assert finding.verdict == "no" and "cannot be had here" in finding.detail
    monkeypatch.setenv("ZEROSTALL_TRANSPORT", "pigeon")
    with pytest.raises(ValueError, match="none of auto, nixl, shm, tcp"):
        config.transport()


def test_rdma_without_a_nixl_that_loads_is_said_and_tcp_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transports, "found", lambda: RDMA)
    monkeypatch.setattr(transports, "_PACKAGES", ("there_is_no_such_package",))
    monkeypatch.setenv("UCX_TLS", "ib,self")
    with caplog.at_level(logging.WARNING, "zerostall"):
        assert transports.open_transport("auto", "n1", "127.0.0.1").name == "tcp"
    assert "there is RDMA, but NIXL is not installed" in caplog.text
    with pytest.raises(CapabilityError):
        load(("there_is_no_such_package",))


def test_ucx_listens_where_the_agent_does_or_not_at_all() -> None:
    assert ucx_settings(RDMA, "eth0") == {"UCX_TLS": "ib,self"}
    assert ucx_settings(Found(), "eth0") == {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    assert "tcp" not in ucx_settings(Found(), "eth0", shared=True)["UCX_TLS"]
    assert transports._device_of("127.0.0.1:7400") == "lo"
    assert transports._device_of("0.0.0.0") == ""


def test_doctor_says_the_way_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "chosen", lambda setting: Choice(False, "there is no RDMA"))
    finding = doctor.between_nodes()
    assert (finding.verdict, finding.detail) == ("yes", "plain TCP: there is no RDMA")
    monkeypatch.undo()
    monkeypatch.setattr(transports, "found", lambda: RDMA)
    said = {}
    for setting in ("auto", "shm", "tcp"):
        monkeypatch.setenv("ZEROSTALL_TRANSPORT", setting)
        said[setting] = doctor.between_nodes().detail
    assert said == {
        "auto": "NIXL: RDMA by mlx5_0, mlx5_1",
        "shm": "NIXL: ZEROSTALL_TRANSPORT says so; shared memory, which reaches agents of this machine",
        "tcp": "plain TCP: ZEROSTALL_TRANSPORT says so",
    }


def test_an_agent_that_does_not_use_it_loads_none_of_it() -> None:
    program = """
import sys
from zerostall.agent import __main__, replication, transports
transports.open_transport("auto", "n1", "127.0.0.1")
print([name for name in sys.modules if name.partition(".")[0] in ("nixl", "nixl_cu13", "numpy", "torch")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
