"""The names that users write. A change here is a decision: say so in CHANGELOG.md."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import zerostall
from zerostall import errors

NAMES = {
    *("Checkpointer", "ExportOptions", "ImportOptions", "Keep", "Peer", "RankLocal", "Remote", "Saving", "errors"),
    *("diff", "export", "import_file", "load", "optim", "pin", "snapshots", "verify"),
}
ERRORS = {
    "AgentError",
    "CapabilityError",
    "CapacityError",
    "CorruptError",
    "DeviceError",
    "ForeignStepError",
    "FormatError",
    "GhostError",
    "ManagerError",
    "MismatchError",
    "NonFiniteError",
    "RankError",
    "ReplacedError",
    "RunBusyError",
    "RunMismatchError",
    "SnapshotNotFoundError",
    "StateError",
    "StepExistsError",
    "StorageError",
    "TornError",
    "VersionError",
    "WaitTimeoutError",
    "ZerostallError",
}
PARAMETERS = {
    "Checkpointer": (
        "where run keep policy when_busy slots freeze_bytes disk_interval rng guard "
        "only frozen expect_shapes require_finite source_checks preempt grace process_group peer disks remote state"
    ),
    "Checkpointer.save": "self step metric pin if_exists when_busy",
    "Checkpointer.restore": "self step required only rename strict prefixes meta_to",
    "Checkpointer.every": "self steps seconds",
    "Checkpointer.guard": "self",
    "Checkpointer.close": "self timeout",
    "Saving.wait": "self tier timeout",
    "Keep": "last every best mode within",
    "Peer": "copies",
    "Remote": "url every keep rate",
    "RankLocal": "value only owner",
    "snapshots": "where",
    "verify": "where step progress",
    "load": "where step only device process_group",
    "export": "where step out options progress",
    "ExportOptions": "only rename dtype weights root format shard_size overwrite",
    "import_file": "source where step options progress",
    "ImportOptions": "only rename dtype root key format run replace",
    "diff": "where a b progress",
    "pin": "where step pinned",
}
COMMANDS = {
    *("ls", "show", "verify", "diff", "pin", "unpin", "export", "import", "doctor", "manager", "status", "top"),
    *("agent start", "agent status", "agent stop", "bench disk"),
}
LIGHT = (
    "zerostall",
    "zerostall.errors",
    "zerostall.agent",
    "zerostall.agent.__main__",
    "zerostall.cli",
    "zerostall.cli.app",
)


def test_names() -> None:
    assert set(zerostall.__all__) == NAMES
    assert set(dir(zerostall)) == {*NAMES, "__version__"}
    for name in NAMES:
        assert getattr(zerostall, name) is not None


def test_errors() -> None:
    found = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert found == ERRORS
    assert all(issubclass(getattr(errors, name), errors.ZerostallError) for name in ERRORS)


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters(path: str) -> None:
    found: object = zerostall
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)
    assert " ".join(inspect.signature(found).parameters) == PARAMETERS[path]


def test_commands() -> None:
    from typer.main import get_command

    from zerostall.cli.app import app

    found = {}
    for name, command in get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {sub}": inner[sub] for sub in inner} if inner else {name: command}
    assert set(found) == COMMANDS
    without = {name for name, one in found.items() if not any("--json" in option.opts for option in one.params)}
    assert without == {"manager", "top"}  # a service, and a picture that is drawn again and again


@pytest.mark.parametrize("module", LIGHT)
def test_no_torch_where_it_has_no_place(module: str) -> None:
    heavy = "{'torch', 'numpy'}"
    code = f"import sys, importlib; importlib.import_module({module!r}); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_import_is_cheap() -> None:
    code = "import sys; before = set(sys.modules); import zerostall; print(len(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) < 40


@pytest.mark.parametrize("name", ["Checkpointer", "load", "RankLocal"])
def test_without_torch_it_is_said_what_to_install(name: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; from zerostall import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"ModuleNotFoundError: zerostall.{name} needs PyTorch" in done.stderr
    assert "pip install torch" in done.stderr
