"""`zerostall agent` and `zerostall doctor`, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from forked import cli as zerostall
from hand import HandTrainer, agent_report, wait_until
from zerostall import __version__
from zerostall.cli.doctor import fallbacks_of
from zerostall.cli.output import size, steps
from zerostall.wire import messages as m


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_agent_is_started_once_shown_and_stopped(agent_environment: dict[str, str]) -> None:
    none = zerostall(agent_environment, "agent", "status", "--json")
    assert (none.returncode, json.loads(none.stdout)["running"]) == (1, False)

    first = zerostall(agent_environment, "agent", "start", "--json")
    second = zerostall(agent_environment, "agent", "start", "--json")
    pid = json.loads(first.stdout)["pid"]
    assert json.loads(second.stdout)["pid"] == pid
    status = json.loads(zerostall(agent_environment, "agent", "status", "--json").stdout)
    assert status["running"] and status["pid"] == pid and status["ranks"] == []
    assert str(pid) in zerostall(agent_environment, "agent", "status").stdout

    assert json.loads(zerostall(agent_environment, "agent", "stop", "--json").stdout) == {"stopped": True}
    assert ended(pid)
    assert json.loads(zerostall(agent_environment, "agent", "stop", "--json").stdout) == {"stopped": False}


def test_an_agent_that_was_killed_leaves_nothing_in_the_way(agent_environment: dict[str, str]) -> None:
    first = json.loads(zerostall(agent_environment, "agent", "start", "--json").stdout)["pid"]
    os.kill(first, signal.SIGKILL)
    second = json.loads(zerostall(agent_environment, "agent", "start", "--json").stdout)["pid"]
    assert second != first


def test_an_error_says_what_to_do(agent_environment: dict[str, str], tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    done = zerostall({**agent_environment, "ZEROSTALL_RUNTIME_DIR": str(shared)}, "agent", "start")
    assert done.returncode == 1
    assert "can be entered by others" in done.stderr and "hint: chmod 700" in done.stderr
    assert "Traceback" not in done.stderr


def test_of_many_runs_one_is_told_in_full(agent_environment: dict[str, str], tmp_path: Path) -> None:
    folder = Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])
    runs = [tmp_path / name for name in ("old", "older", "new")]
    trainers = [HandTrainer(folder, run) for run in runs]
    for trainer in trainers[:2]:
        trainer.leave()
    wait_until(lambda: [rank.trainer_pid for rank in agent_report(folder).ranks].count(None) == 2)
    everything = zerostall(agent_environment, "status").stdout
    assert everything.count("keeps") == 1 and "2 runs that nobody trains: `zerostall status RUN`" in everything
    for command in (["status"], ["agent", "status"]):
        one = zerostall(agent_environment, *command, runs[1])
        assert one.returncode == 0 and str(runs[1]) in one.stdout and str(runs[2]) not in one.stdout
        found = json.loads(zerostall(agent_environment, *command, runs[1], "--json").stdout)
        assert [rank["where"] for rank in found["ranks"]] == [str(runs[1])] == list(found["losses"])
    none = zerostall(agent_environment, "status", tmp_path / "nowhere")
    assert none.returncode == 1 and f"hint: it holds {runs[2]}, {runs[0]}, {runs[1]}" in none.stderr
    trainers[2].leave()


def test_doctor_finds_every_part(agent_environment: dict[str, str], tmp_path: Path) -> None:
    done = zerostall(agent_environment, "doctor", tmp_path, "--json")
    found = {finding["name"]: finding["verdict"] for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert {"zerostall", "torch", "checksums", "shared memory", "memory", "agent", "disk", "direct I/O"} <= set(found)
    assert "no" not in found.values()
    assert list(tmp_path.iterdir()) == []


def test_doctor_lists_what_goes_a_poorer_way(agent_environment: dict[str, str], tmp_path: Path) -> None:
    """What a trainer had to fall back to is in a log that nobody reads; the agent remembers it."""
    folder = Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])
    trainer = HandTrainer(folder, tmp_path / "run")
    trainer.lease()
    told = (m.Fallback("copies are slower", 3), m.Fallback("no locks", 1))
    trainer.seal(1, fallbacks=told)
    trainer.hear(m.Reached, step=1, tier="host")
    report = json.loads(zerostall(agent_environment, "agent", "status", "--json").stdout)
    assert report["ranks"][0]["fallbacks"] == [
        {"text": "copies are slower", "count": 3},
        {"text": "no locks", "count": 1},
    ]
    found = json.loads(zerostall(agent_environment, "doctor", tmp_path, "--json").stdout)
    details = [finding["detail"] for finding in found if finding["name"] == "fallback"]
    where = f"rank 0 of {tmp_path / 'run'}"
    assert {f"{where}: copies are slower (3 times)", f"{where}: no locks"} <= set(details)
    trainer.leave()


def test_what_one_process_fell_back_to_is_said_once() -> None:
    slower, locks = m.Fallback("copies are slower", 3), m.Fallback("no locks", 1)

    def rank(where: str, pid: int | None, *told: m.Fallback) -> m.RankReport:
        return m.RankReport(where, 0, 1, pid, 0, (), (), None, fallbacks=told)

    ranks = (
        rank("a", 7, m.Fallback("copies are slower", 2)),
        rank("b", 7, slower, locks),
        rank("c", 8, slower),
        rank("d", None, locks),
    )
    report = m.Report(1, 99, "0", 0.0, 0, 0, ranks, (m.Fallback("its own", 1),))
    assert [(who, fallback.text, fallback.count) for who, fallback in fallbacks_of(report)] == [
        ("the agent", "its own", 1),
        ("process 7, rank 0 of a, rank 0 of b", "copies are slower", 3),
        ("rank 0 of b", "no locks", 1),
        ("rank 0 of c", "copies are slower", 3),
        ("rank 0 of d", "no locks", 1),
    ]


def test_doctor_says_what_does_not_work(agent_environment: dict[str, str], tmp_path: Path) -> None:
    done = zerostall(agent_environment, "doctor", tmp_path / "nowhere", "--json")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["disk"]["verdict"] == "no" and "nowhere" in found["disk"]["detail"]


def test_the_version_is_said(agent_environment: dict[str, str]) -> None:
    done = zerostall(agent_environment, "--version")
    assert (done.returncode, done.stdout) == (0, f"zerostall {__version__}\n")


def test_sizes_and_steps_in_words() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 30)] == ["0 B", "1023 B", "1.00 KiB", "3.00 GiB"]
    assert [steps(n) for n in ((), (1,), (9, 2, 4, 7))] == ["–", "1", "4, 7, 9 (4 in all)"]
