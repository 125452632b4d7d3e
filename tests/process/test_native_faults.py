"""File jobs of the native core when the system refuses, stops short or interrupts; kills, and forks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shim.faults import Faults, Shim, Trace

CHUNK = 1 << 20
NBYTES = 5 * CHUNK + 1234

PRELUDE = """
import os, sys
from zerostall.native import FileRead, FileWrite, Pool, Segment, crc32c
path, chunk, nbytes, direct = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
pool = Pool("io", 3)
segment = Segment("image", nbytes)
image = segment.view(0, nbytes)
image[:] = bytes(k % 251 for k in range(4096)) * (nbytes // 4096) + bytes(nbytes % 4096)
checksums = [crc32c(image[at : at + chunk]) for at in range(0, nbytes, chunk)]
fd = os.open(path, os.O_RDWR | os.O_CREAT)
def write():
    return FileWrite(pool, fd, segment.address, nbytes, chunk_bytes=chunk, checksums=checksums, direct=direct)
def read():
    other = Segment("other", nbytes)
    job = FileRead(pool, fd, other.address, nbytes, chunk_bytes=chunk, checksums=checksums, direct=direct)
    job.wait()
    assert job.bad == [] and other.view(0, nbytes) == image, job.bad
    return job
"""
WRITE = PRELUDE + "job = write(); job.wait(); print(job.fell_back)"
READ = PRELUDE + "print(read().fell_back)"
ERROR = """
try:
    job = {}
    job.wait()
except OSError as error:
    print(type(error).__name__, error.errno)
"""


def run(code: str, path: Path, *, direct: bool, shim: Shim | None = None, **more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, str(path), str(CHUNK), str(NBYTES), str(direct)]
    environment = {**(shim.environment() if shim else os.environ), **more}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def need_direct(folder: Path) -> None:
    """Skips where the temporary folder's file system has no O_DIRECT."""
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")


def printed(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    assert printed(run(WRITE + "; read()", path, direct=False)) == "None"
    return path


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("op", ["write", "read"])
def test_interruptions_and_short_moves_are_made_good(shim: Shim, path: Path, op: str, direct: bool) -> None:
    if direct:
        need_direct(path.parent)
    expected = path.read_bytes()
    code = READ
    if op == "write":
        code, path = WRITE, path.with_name("fresh-image")
    with Faults(shim, op=op, match="*image", error="EINTR", nth=1, times=3) as fault:
        assert printed(run(code, path, direct=direct, shim=shim)) == "None"
    assert fault.hits > 3
    for short in (1, 4095, 4096, 10_000, 300_000):
        with Faults(shim, op=op, match="*image", short=short, times=40) as fault:
            told = printed(run(code, path, direct=direct, shim=shim))
        assert fault.hits > 3
        assert ("direct" in told) if direct and short % 4096 else (told == "None")
        assert path.read_bytes() == expected


@pytest.mark.parametrize("op", ["write", "read"])
def test_refused_direct_moves_become_plain_ones_and_say_so(shim: Shim, path: Path, op: str) -> None:
    need_direct(path.parent)
    code = WRITE if op == "write" else READ
    with Faults(shim, op=op, match="*image", error="EINVAL", times=1):
        told = printed(run(code, path, direct=True, shim=shim))
    assert "refuses direct" in told
    with Faults(shim, op="direct", match="*image", error="EINVAL"):
        told = printed(run(code, path, direct=True, shim=shim))
    assert "O_DIRECT" in told


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("op", "error", "verb"),
    [
        ("write", "EIO", "write()"),
        ("write", "ENOSPC", "write()"),
        ("truncate", "EIO", "write()"),
        ("read", "EIO", "read()"),
    ],
)
def test_errors_arrive_with_their_number(shim: Shim, path: Path, op: str, error: str, verb: str, direct: bool) -> None:
    with Faults(shim, op=op, match="*image", error=error, nth=1 if op == "truncate" else 3):
        told = printed(run(PRELUDE + ERROR.format(verb), path, direct=direct, shim=shim))
    assert told == f"StorageError {getattr(errno, error)}"


def test_a_full_disk_is_known_before_the_first_byte(shim: Shim, tmp_path: Path) -> None:
    need_direct(tmp_path)
    path = tmp_path / "image"
    with Faults(shim, op="allocate", match="*image", error="ENOSPC"), Trace(shim, match="*image") as trace:
        told = printed(run(PRELUDE + ERROR.format("write()"), path, direct=True, shim=shim))
    assert told == f"StorageError {errno.ENOSPC}"
    assert not [call for call in trace.calls if call.op == "write"]


def test_the_size_is_set_after_the_last_byte(shim: Shim, tmp_path: Path) -> None:
    need_direct(tmp_path)
    path = tmp_path / "image"
    with Trace(shim, match="*image") as trace:
        assert printed(run(WRITE, path, direct=True, shim=shim)) == "None"
    writes = [call for call in trace.calls if call.op == "write"]
    (last,) = [call for call in trace.calls if call.op == "truncate"]
    assert all(last.after(call) for call in writes)
    assert sum(call.result for call in writes) == -(-NBYTES // 4096) * 4096
    assert path.stat().st_size == NBYTES


def test_a_failpoint_kills_before_its_chunk(tmp_path: Path) -> None:
    path = tmp_path / "image"
    done = run(WRITE, path, direct=False, ZEROSTALL_FAILPOINTS="file-write=3")
    assert done.returncode == -signal.SIGKILL
    done = run(WRITE, path, direct=False, ZEROSTALL_FAILPOINTS="file-write=99")
    assert printed(done) == "None"


def test_a_forked_child_lets_go_without_the_threads() -> None:
    """A data loader's worker inherits pools and running jobs, and ends like any process."""
    code = """
import gc, os, torch
from zerostall.native import Capture, Plan, Pool, Segment, Tensors
pool = Pool("capture", 2)
tensors = [torch.ones(3_000_000) for _ in range(4)]
sizes = [tensor.nbytes for tensor in tensors]
plan = Plan(nbytes=sum(sizes), header=b"", chunk_bytes=1 << 16, offsets=[k * sizes[0] for k in range(4)], sizes=sizes)
segment = Segment("image", plan.nbytes)
sources = Tensors(tensors, [False] * 4)
for attempt in range(10):
    capture = Capture(pool, plan, sources, segment.address, at_once=[])
    child = os.fork()
    if child == 0:
        try:
            Capture(pool, plan, sources, segment.address, at_once=[])
        except ValueError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
        del capture, pool, sources, segment, tensors
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert capture.wait(60)
print("fine")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert printed(done) == "fine"


def test_ending_the_interpreter_with_work_under_way() -> None:
    code = PRELUDE + "write().wait(); read(); sys.last = segment; under_way = [write() for _ in range(20)]\n"
    code += "sys.stdout.write('fine')"
    for direct in (True, False):
        path = Path(f"/dev/shm/pytest-of-{os.getpid()}")
        done = run(code, path, direct=direct)
        path.unlink()
        assert printed(done) == "fine"


def test_an_interrupt_ends_a_wait() -> None:
    code = """
import _thread, signal, threading
from zerostall.native import Pool, Segment, Verify
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background
pool = Pool("io", 1)
big = Segment("big", 64 << 20)
threading.Timer(0.3, _thread.interrupt_main).start()
try:
    while True:
        Verify(pool, big.address, 64 << 20, 1 << 20, [0] * 64).wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert printed(done) == "interrupted"
