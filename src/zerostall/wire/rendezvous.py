"""Where the node's agent listens, and how to reach or start it.

The socket lies in a folder that only its owner can enter. One agent a folder: whoever holds `agent.lock` is the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import zerostall
from zerostall.errors import AgentError, CapabilityError
from zerostall.wire.channel import Channel, peer
from zerostall.wire.messages import PROTOCOL, FromAgent

START_SECONDS = 60.0
_AGAIN_SECONDS = 4.0
_LOOK_SECONDS = 0.005


def socket_path(folder: Path) -> Path:
    """The agent's socket. Its name carries the protocol, so that two versions live side by side."""
    return folder / f"agent-{PROTOCOL}.sock"


def lock_path(folder: Path) -> Path:
    """What makes an agent the one of its folder and protocol."""
    return folder / f"agent-{PROTOCOL}.lock"


def log_path(folder: Path) -> Path:
    return folder / "agent.log"


def private_folder(folder: Path) -> Path:
    """Create the folder, or check that it is ours alone.

    Raises:
        CapabilityError: it belongs to somebody else or others can enter it.
    """
    try:
        for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                path.chmod(0o700)  # whatever the umask took away
        facts = folder.lstat()
    except OSError as error:
        raise CapabilityError(
            f"the agent's folder {folder} cannot be made: {error.strerror}",
            hint="set ZEROSTALL_RUNTIME_DIR to a folder of your own",
        ) from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise CapabilityError(
            f"{folder} is not a folder of user {os.geteuid()}", hint="set ZEROSTALL_RUNTIME_DIR to a folder of your own"
        )
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise CapabilityError(
            f"{folder} can be entered by others (mode {stat.S_IMODE(facts.st_mode):o})",
            hint=f"chmod 700 {folder}, or set ZEROSTALL_RUNTIME_DIR to a private folder",
        )
    return folder


@contextlib.contextmanager
def locked(path: Path):
    """Hold an exclusive lock on a file while in the block."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def connect(folder: Path) -> Channel[FromAgent] | None:
    """A channel to the agent that listens in `folder`, or None when there is none."""
    path = socket_path(folder)
    if len(os.fsencode(path)) > 107:
        raise CapabilityError(
            f"{path} is longer than a socket's name may be (107 bytes)",
            hint="set ZEROSTALL_RUNTIME_DIR to a shorter path",
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise AgentError(f"cannot reach the agent at {path}: {error}") from error
    if peer(sock)[1] != os.geteuid():
        sock.close()
        raise AgentError(f"the agent at {path} runs as another user")
    return Channel(sock, FromAgent)


def connect_or_start(folder: Path, *, timeout: float = START_SECONDS) -> Channel[FromAgent]:
    """A channel to the node's agent, which is started if none listens.

    Raises:
        AgentError: it did not come up within `timeout` seconds; the end of its log is in the message.
    """
    private_folder(folder)
    channel = connect(folder)
    if channel is not None:
        return channel
    with locked(folder / "launch.lock"):
        channel = connect(folder)  # another process may have started it meanwhile
        if channel is not None:
            return channel
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            # More than once: the one before may still be leaving, and an agent that finds another one ends at once.
            if _launch(folder) > 0:
                raise AgentError(f"the agent does not start; the end of {log_path(folder)}:\n{_log_tail(folder)}")
            again = min(time.monotonic() + _AGAIN_SECONDS, deadline)  # launching may itself take long
            while (channel := connect(folder)) is None and time.monotonic() < again:
                time.sleep(_LOOK_SECONDS)
            if channel is not None:
                return channel
    raise AgentError(
        f"the agent did not start within {timeout:.0f} s; the end of {log_path(folder)}:\n{_log_tail(folder)}",
        hint="run `zerostall agent start` and read what it says",
    )


def _log_tail(folder: Path) -> str:
    try:
        return log_path(folder).read_text(errors="replace")[-2000:]
    except OSError as error:
        return f"(it cannot be read: {error})"


def _launch(folder: Path) -> int:
    """Start a detached agent: no fork of this process's memory, no inherited descriptors, own session.

    Returns the exit status of what detaches it: above 0 where no agent can be started as things are, negative where it
    was killed.
    """
    environment = dict(os.environ)
    package_root = str(Path(zerostall.__file__).resolve().parent.parent)
    search = [str(Path(entry).absolute()) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment["PYTHONPATH"] = os.pathsep.join([package_root, *(s for s in search if s != package_root)])
    command = [sys.executable, "-P", "-m", "zerostall.agent", "--detach", "--runtime-dir", os.fspath(folder)]
    log_fd = os.open(log_path(folder), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(log_fd, "ab") as log:
        os.fchmod(log_fd, 0o600)
        launcher = subprocess.Popen(
            command,
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    # It hands over to its detached child at once, so no zombie is left here. Not wait() with a timeout, which comes to
    # look every 50 ms only.
    deadline = time.monotonic() + START_SECONDS
    while (status := launcher.poll()) is None:
        if time.monotonic() > deadline:
            launcher.kill()
            launcher.wait()
            raise AgentError(f"starting the agent took more than {START_SECONDS:.0f} s")
        time.sleep(_LOOK_SECONDS)
    return status
