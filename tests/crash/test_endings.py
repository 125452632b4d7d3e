"""However a trainer ends, nothing of it stays: no file in /dev/shm, no process, no half step (cases C11, C23)."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.live import on_disk, restored
from crash.nursery import Nursery
from crash.script import leftovers
from hand import HandTrainer, agent_pid, wait_until
from zerostall.wire import rendezvous

ENDINGS = {
    "falls off the end": ("", 0),
    "an exception": ("raise ValueError('on purpose')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "sys.exit in a with block": ("with run: sys.exit(4)", 4),
    "daemon threads": ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", 0),
    "a thread that saves": ("t = threading.Thread(target=run.save, daemon=True); t.start(); t.join()", 0),
    "a forked child that exits": (
        "child = os.fork()\nif child == 0: sys.exit(0)\nassert os.waitpid(child, 0)[1] == 0",
        0,
    ),
    "a forked child that trains": (
        "child = os.fork()\nif child == 0:\n    run.job.train_one_step(); run.ckpt.close(); sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0",
        0,
    ),
    "os._exit": ("os._exit(5)", 5),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending(
    trainers: Nursery, agent_environment: dict[str, str], folder: Path, where: Path, tmp_path: Path, ending: str
) -> None:
    before = shared_memory()
    code, expected = ENDINGS[ending]
    trainer = trainers.start(where, "--ending", code, environment=agent_environment, output=tmp_path / "output")
    assert trainer.wait() == expected, trainer.printed()
    if ending == "os._exit":
        assert restored(where) in (1, 2)
    else:
        steps = on_disk(where)  # the second may have given way to a third that came while the disk rested
        assert steps[0] == 1 and steps[-1] >= 2
        assert restored(where) >= 2
    assert not leftovers(where)
    assert shared_memory() == before


def test_nothing_piles_up_over_many_deaths(
    trainers: Nursery, agent_environment: dict[str, str], folder: Path, where: Path, tmp_path: Path
) -> None:
    """Case C23: memory of killed trainers is the agent's, has no name, and is lent again to the next one."""
    environment = {**agent_environment, "ZEROSTALL_AGENT_IDLE": "0.5"}
    before = shared_memory()
    for life in range(6):
        trainer = trainers.start(where, "--scale=1", environment=environment, output=tmp_path / f"life-{life}")
        wait_until(lambda: " host" in trainer.printed() or trainer.ended())
        if life == 0:  # as long as somebody is there the agent is not idle
            other = HandTrainer(folder, where.parent / "other")
        trainer.kill()
        if life == 0:
            pid = agent_pid(folder)
            lent = segments(pid)
    assert agent_pid(folder) == pid
    assert segments(pid) == lent
    assert shared_memory() == before
    other.leave()
    wait_until(lambda: not rendezvous.socket_path(folder).exists())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert shared_memory() == before


def shared_memory() -> list[str]:
    """Names in /dev/shm that could be ours; others come and go as other programs like."""
    return sorted(path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("zerostall", "psm_")))


def segments(pid: int) -> int:
    """How many pieces of shared memory a process has open."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += "memfd:zerostall" in str(fd.readlink())
        except OSError:
            continue
    return count
