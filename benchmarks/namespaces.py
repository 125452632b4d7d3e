"""Nodes on one machine: network namespaces on one switch, with own addresses, to be cut, slowed and killed.

Needs root and the commands `ip` and, to slow a link, `tc`. Nothing outside the namespaces is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SUBNETS = itertools.count(1)
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip is missing (iproute2)"
    trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace can be made: {trial.stderr.strip()}" if trial.returncode else None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Node:
    """One namespace: processes, and a link to the switch."""

    def __init__(self, name: str, namespace: str, switch: str, address: str) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace
        self._switch = switch
        self._port = f"{namespace}p"
        _ip("netns", "add", namespace)
        _ip("-n", switch, "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", switch, "link", "set", self._port, "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[str] | int, stdout: int | None = None
    ) -> subprocess.Popen[str]:
        """A process of this node; its errors (and its output, without `stdout`) go to `log`."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            env=dict(environment),
            stdout=log if stdout is None else stdout,
            stderr=log,
            text=True,
            bufsize=1,
        )

    def processes(self) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        ).stdout
        return [int(word) for word in found.split()]

    def signal(self, number: int) -> None:
        """To every process of this node."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """The machine is gone: nothing on it runs any more, and it answers nobody."""
        self.cut()
        while self.processes():
            self.signal(signal.SIGKILL)
            time.sleep(0.01)

    def cut(self) -> None:
        """Nothing gets in or out, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "master", "bridge")

    def slow(self, megabits: int) -> None:
        """Bound what this node sends, in megabits a second."""
        rate = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "400ms"]
        command = ["tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", "root", *rate]
        subprocess.run(command, check=True, capture_output=True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens meanwhile are this node's."""
        with Path("/proc/thread-self/ns/net").open() as home, Path("/run/netns", self.namespace).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Network:
    """A switch and its nodes; gone with all their processes after `close`."""

    def __init__(self) -> None:
        self._prefix = f"zs{os.getpid()}n{next(_SUBNETS)}"
        self._switch = f"{self._prefix}s"
        self.nodes: dict[str, Node] = {}
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")

    def add(self, name: str) -> Node:
        number = len(self.nodes) + 1
        node = Node(name, f"{self._prefix}{number}", self._switch, f"10.77.0.{number}")
        self.nodes[name] = node
        return node

    def close(self) -> None:
        for node in self.nodes.values():
            with contextlib.suppress(OSError):
                node.kill()
            with contextlib.suppress(OSError):
                _ip("netns", "delete", node.namespace)
        _ip("netns", "delete", self._switch)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
