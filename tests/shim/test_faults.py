"""The fault shim does what its rules say, and nothing else."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shim.faults import Faults, Shim, Trace


def run(shim: Shim, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process under the shim; `argv[1:]` are the arguments."""
    command = [sys.executable, "-S", "-c", f"import os, sys\n{code}", *map(str, arguments)]
    return subprocess.run(command, env=shim.environment(), capture_output=True, text=True, timeout=60)


WRITE = """
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
for i in range(int(sys.argv[2])):
    try:
        print(os.pwrite(fd, b"x" * 100, i * 100))
    except OSError as error:
        print("errno", error.errno)
    sys.stdout.flush()
"""


def test_without_rules_nothing_changes(shim: Shim, tmp_path: Path) -> None:
    path = tmp_path / "a"
    done = run(shim, WRITE, path, 2)
    assert (done.returncode, done.stdout.split()) == (0, ["100", "100"])
    assert path.read_bytes() == b"x" * 200


def test_an_error_strikes_the_nth_match_and_no_other(shim: Shim, tmp_path: Path) -> None:
    with Faults(shim, op="write", match="*/a", error="EIO", nth=2, times=1) as fault:
        done = run(shim, WRITE, tmp_path / "a", 3)
        other = run(shim, WRITE, tmp_path / "b", 3)
    assert done.stdout.split("\n")[:3] == ["100", f"errno {errno.EIO}", "100"]
    assert other.stdout.split() == ["100"] * 3
    assert fault.hits == 3


def test_short_writes(shim: Shim, tmp_path: Path) -> None:
    with Faults(shim, op="write", match="*/a", short=7):
        done = run(shim, WRITE, tmp_path / "a", 2)
    assert done.stdout.split() == ["7", "7"]


def test_short_vectored_writes_end_inside_a_piece(shim: Shim, tmp_path: Path) -> None:
    code = """
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
print(os.writev(fd, [b"abc", b"defgh", b"ij"]), os.pwritev(fd, [b"ABC", b"DEFGH"], 4))
"""
    with Faults(shim, op="write", match="*/a", short=4):
        done = run(shim, code, tmp_path / "a")
    assert done.stdout.split() == ["4", "4"], done.stderr
    assert (tmp_path / "a").read_bytes() == b"abcdABCD"


def test_a_disk_that_fills_up(shim: Shim, tmp_path: Path) -> None:
    with Faults(shim, op="write", match=f"{tmp_path}/*", room=250):
        done = run(shim, WRITE, tmp_path / "a", 4)
    assert done.stdout.split("\n")[:4] == ["100", "100", "50", f"errno {errno.ENOSPC}"]


def test_a_kill_in_the_middle_of_a_write_leaves_what_was_written(shim: Shim, tmp_path: Path) -> None:
    with Faults(shim, op="write", match="*/a", kill=30, nth=2):
        done = run(shim, WRITE, tmp_path / "a", 4)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["100"]
    assert (tmp_path / "a").stat().st_size == 130


@pytest.mark.parametrize(("after", "left"), [(False, {"old"}), (True, {"new"})])
def test_a_kill_before_and_after_a_rename(shim: Shim, tmp_path: Path, after: bool, left: set[str]) -> None:
    (tmp_path / "old").write_text("x")
    when = {"kill_after": True} if after else {"kill": 0}
    with Faults(shim, op="rename", match="*/new", **when):
        done = run(shim, "os.rename(sys.argv[1] + '/old', sys.argv[1] + '/new')", tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert {p.name for p in tmp_path.iterdir()} == left


CALLS = {
    "open": "os.open(p, os.O_RDONLY)",
    "read": "os.pread(fd, 4, 0)",
    "write": "os.pwrite(fd, b'abc', 0)",
    "fsync": "os.fsync(fd)",
    "fdatasync": "os.fdatasync(fd)",
    "truncate": "os.ftruncate(fd, 3)",
    "allocate": "os.posix_fallocate(fd, 0, 4096)",
    "rename": "os.replace(p, p + '2')",
    "link": "os.link(p, p + '2')",
    "unlink": "os.unlink(p)",
    "mkdir": "os.mkdir(p + '.d')",
    "rmdir": "os.rmdir(os.path.dirname(p) + '/empty')",
    "direct": "os.open(p, os.O_RDONLY | os.O_DIRECT)",
}


@pytest.mark.parametrize("op", CALLS)
def test_every_operation_can_be_made_to_fail_and_is_traced(shim: Shim, tmp_path: Path, op: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"01234567")
    (tmp_path / "empty").mkdir()
    code = f"p = sys.argv[1]; fd = os.open(p, os.O_RDWR)\n{CALLS[op]}"
    with (
        Faults(shim, op=op, match=f"{tmp_path}/*", error="EDQUOT", nth=2 if op == "open" else 1),
        Trace(shim) as t,
    ):
        done = run(shim, code, path)
    assert f"[Errno {errno.EDQUOT}]" in done.stderr
    assert [call.errno for call in t.calls if call.op == op and call.path.startswith(str(tmp_path))][-1] == errno.EDQUOT


def test_o_direct_switched_on_later_can_be_refused(shim: Shim, tmp_path: Path) -> None:
    code = """
import fcntl
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL))
fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
"""
    with Faults(shim, op="direct", match="*/a", error="EINVAL") as fault:
        done = run(shim, code, tmp_path / "a")
    assert "Errno 22" in done.stderr
    assert fault.hits == 1


def test_a_flipped_bit_is_only_seen_by_the_reader(shim: Shim, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8))
    code = "print(os.pread(os.open(sys.argv[1], os.O_RDONLY), 8, 0).count(0))"
    with Faults(shim, op="read", match="*/a", flip=True):
        assert run(shim, code, tmp_path / "a").stdout.strip() == "7"
    assert (tmp_path / "a").read_bytes() == bytes(8)


def test_rules_come_and_go_while_the_process_runs(shim: Shim, tmp_path: Path) -> None:
    code = """
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
for line in sys.stdin:
    try:
        print(os.write(fd, b"abc"), flush=True)
    except OSError as error:
        print("errno", error.errno, flush=True)
"""
    command = [sys.executable, "-S", "-c", f"import os, sys\n{code}", str(tmp_path / "a")]
    with subprocess.Popen(
        command, env=shim.environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def say() -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        for _ in range(50):
            assert say() == "3"
            with Faults(shim, op="write", match="*/a", error="EACCES"):
                assert say() == f"errno {errno.EACCES}"
        process.stdin.close()


def test_a_held_call_waits_for_the_rule_to_be_lifted(shim: Shim, tmp_path: Path) -> None:
    results: list[subprocess.CompletedProcess[str]] = []
    with Faults(shim, op="fsync", match="*/a", hold=True) as fault:
        code = "fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); os.fsync(fd); print('synced')"
        thread = threading.Thread(target=lambda: results.append(run(shim, code, tmp_path / "a")), name="held")
        thread.start()
        deadline = time.monotonic() + 30
        while not fault.hits and time.monotonic() < deadline:
            time.sleep(0.005)
        assert fault.hits == 1 and not results
        fault.lift()
        thread.join(30)
    assert results[0].stdout.strip() == "synced"


def test_the_trace_orders_calls_over_processes(shim: Shim, tmp_path: Path) -> None:
    code = """
folder = sys.argv[1]
fd = os.open(folder + "/data\\twith tab", os.O_CREAT | os.O_WRONLY)
os.write(fd, b"abc"); os.write(fd, b"def")
if os.fork() == 0:
    os.fsync(fd); os._exit(0)
os.wait()
os.rename(folder + "/data\\twith tab", folder + "/final")
where = os.open(folder, os.O_RDONLY); os.fsync(where)
"""
    with Trace(shim, match=f"{tmp_path}*") as trace:
        done = run(shim, code, tmp_path)
    assert done.returncode == 0, done.stderr
    calls = trace.calls
    assert [c.op for c in calls] == ["open", "write", "write", "fsync", "rename", "open", "fsync"]
    assert all(b.after(a) for a, b in itertools.pairwise(calls))
    assert calls[0].path == f"{tmp_path}/data\twith tab" and calls[0].argument & os.O_CREAT
    assert [c.result for c in calls[1:3]] == [3, 3]
    assert calls[4].second == f"{tmp_path}/final" and calls[6].path == str(tmp_path)
    assert calls[3].pid != calls[2].pid


def test_names_relative_to_a_folder_are_made_whole(shim: Shim, tmp_path: Path) -> None:
    code = """
folder = os.open(sys.argv[1], os.O_RDONLY)
os.mkdir("sub", dir_fd=folder)
os.chdir(sys.argv[1]); os.close(os.open("here", os.O_CREAT | os.O_WRONLY))
"""
    with Trace(shim, op="mkdir,open", match=f"{tmp_path}/*") as trace:
        run(shim, code, tmp_path)
    assert [call.path for call in trace.calls] == [f"{tmp_path}/sub", f"{tmp_path}/here"]


def test_a_rule_needs_exactly_one_fault(shim: Shim) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Faults(shim, op="write")
    with pytest.raises(ValueError, match="exactly one"):
        Faults(shim, op="write", short=3, hold=True)
    with pytest.raises(ValueError, match="tabs"):
        Faults(shim, op="write", match="a\tb", short=3)
