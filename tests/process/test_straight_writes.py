"""Saves that go from a vault's memory straight to disk, with a real agent on stand-ins of the driver and of cuFile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hand import agent_report, wait_until
from standin.cuda import cuda_include
from standin.cufile import compile_library, cufile_include
from standin.training import Trainer, save
from zerostall.flow import catalog

Start = Callable[..., Trainer]
NO_LIBRARY = {"ZEROSTALL_GDS": "on", "ZEROSTALL_LIBCUFILE": "nothing.so"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    includes = cufile_include(), cuda_include()
    if None in includes:
        pytest.skip("no cufile.h")
    return compile_library(tmp_path_factory.mktemp("fake-cufile"), *filter(None, includes))


@pytest.fixture
def start(start_on_stand_in: Start, library: Path) -> Start:
    def start(environment: dict[str, str] | None = None, **options: object) -> Trainer:
        return start_on_stand_in({"ZEROSTALL_LIBCUFILE": str(library), **(environment or {})}, peer=True, **options)

    return start


@pytest.fixture
def folder(agent_environment: dict[str, str]) -> Path:
    return Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])


def through_the_vault(trainer: Trainer) -> int:
    """Save until one went through the vault and is on disk; its step."""
    for step in range(1, 10):
        save(trainer, step)
        if trainer.ask("stats")["stowed"]:
            assert trainer.ask("wait", step, "disk") == ""
            return step
        wait_until(lambda: trainer.ask("has locker"))
    pytest.fail("nothing was stowed")


def peer_is(folder: Path) -> str:
    """What the agent says of the tier."""
    (rank,) = agent_report(folder).ranks
    return next(tier.where for tier in rank.tiers if tier.tier == "peer")


def said(folder: Path) -> str:
    return " ".join(found.text for found in agent_report(folder).fallbacks)


def on_disk(where: Path, step: int) -> None:
    """The file is what was saved: every checksum fits, and so do the bytes, by another's eyes."""
    import numpy as np
    from safetensors.numpy import load_file

    assert all(verdict.clean for verdict in catalog.verify(where, step))
    tensors = load_file(where / f"step-{step:012d}" / "rank-00000.safetensors")
    for tensor in tensors.values():
        assert (tensor.reshape(-1).view(np.uint8) == step).all()


def test_a_save_goes_straight_to_disk(start: Start, folder: Path, tmp_path: Path) -> None:
    trainer = start()
    step = through_the_vault(trainer)
    assert "0.0168 GB went straight to disk" in peer_is(folder)  # one whole chunk of two
    on_disk(tmp_path / "run", step)
    save(trainer, 12)
    assert trainer.ask("wait", 12, "disk") == ""
    assert "0.0336 GB went straight to disk" in peer_is(folder)
    assert not said(folder)
    trainer.close()
    on_disk(tmp_path / "run", 12)


@pytest.mark.parametrize(
    ("environment", "why", "told"),
    [
        ({"FAKE_CUFILE_FAIL": "cuFileHandleRegister 1 5027"}, "(5027)", "the host's /run/udev"),
        pytest.param({"ZEROSTALL_GDS": "off"}, "switched off", "", marks=pytest.mark.long),
        pytest.param({"FAKE_CUFILE_WITHOUT_DRIVER": "1"}, "nvidia-fs is not loaded", "", marks=pytest.mark.long),
        pytest.param(NO_LIBRARY, "cuFile cannot be opened", "ZEROSTALL_GDS=on, but", marks=pytest.mark.long),
        pytest.param(
            {"FAKE_CUFILE_FAIL": "cuFileWrite 1 28"}, "No space left", "through host memory", marks=pytest.mark.long
        ),
        pytest.param(
            {"FAKE_CUDA_FAIL": "vault cuModuleLoadData 1 719"}, "", "through host memory", marks=pytest.mark.long
        ),
    ],
    ids=["refused", "off", "no nvidia-fs", "no library", "fault", "no kernel"],
)
def test_what_cannot_go_straight_goes_through_host_memory(
    start: Start, folder: Path, tmp_path: Path, environment: dict[str, str], why: str, told: str
) -> None:
    trainer = start(environment)
    step = through_the_vault(trainer)
    assert "to disk through host memory" in peer_is(folder) and why in peer_is(folder)
    assert told in said(folder) and bool(told) == bool(said(folder))
    on_disk(tmp_path / "run", step)
    trainer.close()


def test_bytes_that_have_changed_in_the_vault_do_not_get_to_disk(start: Start, folder: Path, tmp_path: Path) -> None:
    trainer = start(disk_interval=3600.0)
    step = through_the_vault(trainer)
    save(trainer, 12)
    trainer.ask("spoil vault")
    assert trainer.ask("wait", 12, "disk") == ""
    assert "chunk 0 fails its checksum in the GPU's memory" in said(folder)
    assert step != 12
    on_disk(tmp_path / "run", 12)
    trainer.close()
