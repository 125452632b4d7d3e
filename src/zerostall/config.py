"""Settings: what a caller may choose, checked once, and what the environment may add.

ZEROSTALL_RUNTIME_DIR    folder of the agent's socket, lock and log (default: $XDG_RUNTIME_DIR/zerostall, else
                         <temp>/zerostall-<uid>)
ZEROSTALL_HOST_BUDGET    most bytes of shared memory the agent lends on this node (default: half of the memory);
                         suffixes K, M, G, T are powers of 1024
ZEROSTALL_VAULT_BUDGET   most bytes of each GPU's memory that the agent lends to other GPUs' trainers, where these ask
                         for it with `peer=True` (default: half of what is free when it is first asked for; 0: none)
ZEROSTALL_SCRUB_RATE     most bytes a second of the images in memory that are checked once more although nobody asks,
                         while nothing else goes on (default: 64M; 0: none)
ZEROSTALL_SCRUB_REST     seconds that an image on disk is left alone after it was checked so (default: 86400, a day)
ZEROSTALL_AGENT_IDLE     seconds without a trainer after which the agent leaves (default: 1800)
ZEROSTALL_COPY_THREADS   threads that copy tensors in the training process (default: 2, or 1 where training computes on
                         all cores but one; or 8, at most half of the cores, where the state is on a CUDA device
                         and they take checksums of what arrives)
ZEROSTALL_GDS            whether files go straight to a CUDA device's memory, and saves straight from one to disk, by
                         GPUDirect Storage: auto (default), on, off
ZEROSTALL_STORE_TIMEOUT  seconds that an object store may be silent before a request is sent again (default: 30)

Object stores take credentials, region and endpoint from where their own tools do: AWS_…, GOOGLE_…, AZURE_…,
STORAGE_EMULATOR_HOST (what stands in for Google's, and asks for no credentials), ~/.aws. What the training process has
in its environment goes to the agent over their socket.
ZEROSTALL_RANKS_PATIENCE seconds without a sign of life after which one rank gives another up (default: 480)

Of an agent that belongs to a cluster:

ZEROSTALL_MANAGER        the manager's URL, or those of several with commas; without it an agent is on its own
ZEROSTALL_TOKEN_FILE     the cluster's secret (default: ~/.config/zerostall/token)
ZEROSTALL_NODE           the node's name (default: the host name)
ZEROSTALL_LABELS         its failure domains, such as rack=r7,leaf=sw3
ZEROSTALL_PEER           address for other agents, HOST or HOST:PORT; without it none keeps images of another. Where
                         a run's ranks are on several nodes, HOST is also where rank 0's agent meets the others
                         (default there: MASTER_ADDR, else the host name)
ZEROSTALL_REPLICA_BUDGET most bytes of memory for other nodes' images (default: a quarter of the host budget)
ZEROSTALL_REPLICA_DISK   folder for other nodes' images on this node's disk; without it they are in memory only
ZEROSTALL_REPLICA_RATE   most bytes a second that go to other nodes (default: no bound)
ZEROSTALL_TRANSPORT      how images go to other nodes: auto (default: NIXL where there is RDMA, else tcp), nixl, tcp, or
                         shm between agents of one machine
ZEROSTALL_MANAGER_CA     file of certificates to check the manager's by, where they are not the system's
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from zerostall import memory

if TYPE_CHECKING:
    from collections.abc import Mapping

Policy = Literal["overlap", "freeze", "flip", "auto"]
WhenBusy = Literal["skip", "wait"]
Frozen = Literal["save", "leave"]
IfExists = Literal["error", "skip", "replace"]
Gds = Literal["auto", "on", "off"]
Transport = Literal["auto", "nixl", "shm", "tcp"]
_Choice = TypeVar("_Choice", bound=str)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str, name: str) -> int:
    """A number of bytes such as `4096`, `512M` or `1.5G`.

    Raises:
        ValueError: naming the setting.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{name}={text!r} is not a number of bytes such as 512M or 1.5G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_seconds(value: float | str, name: str) -> float:
    """Seconds of a number, or of a text such as "30s", "10m", "1.5h", "1d". ValueError naming the setting."""
    seconds = float("nan")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", value)
        if match is not None:
            seconds = float(match[1]) * _TIMES[match[2]]
    elif not isinstance(value, bool):
        seconds = float(value)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name}={value!r} is not a time such as 30, '30s', '10m' or '1h'")
    return seconds


def runtime_dir() -> Path:
    """The folder of the agent's socket. Not created here."""
    chosen = os.environ.get("ZEROSTALL_RUNTIME_DIR")
    if chosen:
        return Path(chosen).absolute()
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        return Path(session) / "zerostall"
    return Path(tempfile.gettempdir()) / f"zerostall-{os.getuid()}"


def store_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What of an environment concerns object stores: credentials, regions, endpoints. Not for logs."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name in ("HOME", "STORAGE_EMULATOR_HOST")
    }


def gds() -> Gds:
    """Whether files go straight to a device's memory, and from it; see `core.gds.choose`."""
    return _one_of("ZEROSTALL_GDS", ("auto", "on", "off"))


def transport() -> Transport:
    """How images go to other nodes; see `core.transports.choose`."""
    return _one_of("ZEROSTALL_TRANSPORT", ("auto", "nixl", "shm", "tcp"))


def _one_of(name: str, known: tuple[_Choice, ...]) -> _Choice:
    """What the environment chooses; the first where it says nothing."""
    chosen = os.environ.get(name, known[0])
    for one in known:
        if chosen == one:
            return one
    raise ValueError(f"{name}={chosen!r} is none of {', '.join(known)}")


def store_timeout() -> float:
    """Seconds that an object store may be silent before a request is sent again."""
    chosen = os.environ.get("ZEROSTALL_STORE_TIMEOUT", "30")
    try:
        seconds = float(chosen)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ValueError(f"ZEROSTALL_STORE_TIMEOUT={chosen!r} is not a number of seconds (0.1 to 3600)")
    return seconds


def copy_threads() -> int | None:
    """How many threads shall copy tensors in the training process, where the environment says so."""
    chosen = os.environ.get("ZEROSTALL_COPY_THREADS")
    if chosen is not None and (not chosen.isdecimal() or not 1 <= int(chosen) <= 256):
        raise ValueError(f"ZEROSTALL_COPY_THREADS={chosen!r} is not a number of threads (1 to 256)")
    return int(chosen) if chosen is not None else None


def restore_threads() -> int:
    """How many threads bring a snapshot back into tensors, while training waits for nothing else."""
    return max(copy_threads() or 1, min(8, cores()))


def read_threads() -> int:
    """How many blocks of a file are read at once, each by a thread that checks it and brings it to its tensors.

    At least eight, however few the cores: while some are checked, others are to be on their way.
    """
    return max(8, restore_threads())


def ranks_patience() -> float:
    """Seconds without a sign of life after which a rank is given up.

    Less than the ten minutes after which NCCL ends a process whose collective nobody joins: where ranks are at
    different points of a program, the error that says so comes first.
    """
    chosen = os.environ.get("ZEROSTALL_RANKS_PATIENCE", "480")
    with contextlib.suppress(ValueError):
        if 0 < float(chosen) < float("inf"):
            return float(chosen)
    raise ValueError(f"ZEROSTALL_RANKS_PATIENCE={chosen!r} is not a number of seconds")


def host_for_nodes() -> str:
    """This node's name or address, as other nodes may know it.

    Rank 0's is what counts: ZEROSTALL_PEER, else MASTER_ADDR, which launchers set to rank 0's node, else the host name.
    """
    chosen = os.environ.get("ZEROSTALL_PEER", "")
    host = chosen if chosen.count(":") != 1 and not chosen.startswith("[") else chosen.rpartition(":")[0] or chosen
    return host or os.environ.get("MASTER_ADDR") or socket.gethostname()


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent is started with.

    Attributes:
        runtime_dir: folder of its socket, lock and log.
        host_budget: most bytes of shared memory it lends.
        idle_seconds: it leaves after that long without a trainer and with nothing to do.
        vault_budget: most bytes of each GPU's memory that it lends; None for half of what is free.
        scrub_rate: most bytes a second that it checks although nobody asks.
        scrub_rest: seconds from one such check of an image on disk to the next.
    """

    runtime_dir: Path
    host_budget: int
    idle_seconds: float
    vault_budget: int | None = None
    scrub_rate: int = 64 << 20
    scrub_rest: float = 86400.0

    @classmethod
    def from_environment(cls) -> AgentSettings:
        budget = os.environ.get("ZEROSTALL_HOST_BUDGET")
        vault = os.environ.get("ZEROSTALL_VAULT_BUDGET")
        scrub = os.environ.get("ZEROSTALL_SCRUB_RATE", "64M")
        return cls(
            runtime_dir=runtime_dir(),
            host_budget=parse_bytes(budget, "ZEROSTALL_HOST_BUDGET") if budget else memory.limit() // 2,
            idle_seconds=_seconds("ZEROSTALL_AGENT_IDLE", 1800.0),
            vault_budget=parse_bytes(vault, "ZEROSTALL_VAULT_BUDGET") if vault else None,
            scrub_rate=parse_bytes(scrub, "ZEROSTALL_SCRUB_RATE"),
            scrub_rest=_seconds("ZEROSTALL_SCRUB_REST", 86400.0),
        )


def _seconds(name: str, default: float) -> float:
    value = os.environ.get(name) or str(default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{name}={value!r} is not a number of seconds")
    return seconds


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """What makes an agent part of a cluster.

    Attributes:
        manager: the manager's URL, without a slash at its end; with commas between several.
        token_file: the cluster's secret.
        node, labels: the node's name and failure domains.
        peer: address for other agents, "" for none.
        replica_budget: most bytes of memory for other nodes' images.
        replica_disk: folder for other nodes' images, None to keep them in memory only.
        replica_rate: most bytes a second that go to other nodes; None for no bound.
        transport: how images go to other nodes.
        authorities: file of certificates to check the manager's by, None for the system's.
    """

    manager: str
    token_file: Path
    node: str
    labels: str = ""
    peer: str = ""
    replica_budget: int = 0
    replica_disk: Path | None = None
    replica_rate: int | None = None
    transport: Transport = "auto"
    authorities: Path | None = None

    @classmethod
    def from_environment(cls, host_budget: int) -> MemberSettings | None:
        """What the environment says; None where it names no manager."""
        manager = os.environ.get("ZEROSTALL_MANAGER", "").rstrip("/")
        if not manager:
            return None
        if not all(re.match(r"https?://[^/]+$", url) for url in manager.split(",")):
            raise ValueError(f"ZEROSTALL_MANAGER={manager!r} is not a URL such as http://10.0.0.1:7077, or several")
        budget = os.environ.get("ZEROSTALL_REPLICA_BUDGET")
        rate = os.environ.get("ZEROSTALL_REPLICA_RATE")
        disk = os.environ.get("ZEROSTALL_REPLICA_DISK")
        authorities = os.environ.get("ZEROSTALL_MANAGER_CA")
        return cls(
            manager=manager,
            token_file=token_file(),
            node=os.environ.get("ZEROSTALL_NODE") or socket.gethostname(),
            labels=os.environ.get("ZEROSTALL_LABELS", ""),
            peer=os.environ.get("ZEROSTALL_PEER", ""),
            replica_budget=parse_bytes(budget, "ZEROSTALL_REPLICA_BUDGET") if budget else host_budget // 4,
            replica_disk=Path(disk).absolute() if disk else None,
            replica_rate=parse_bytes(rate, "ZEROSTALL_REPLICA_RATE") if rate else None,
            transport=transport(),
            authorities=Path(authorities) if authorities else None,
        )


def token_file() -> Path:
    """Where the cluster's secret lies."""
    chosen = os.environ.get("ZEROSTALL_TOKEN_FILE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "zerostall" / "token"


def umask() -> int | None:
    """This process's umask, read without setting it, which would be seen by other threads; None if it cannot be."""
    try:
        found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1], 8) if found else None


def cores() -> int:
    """How many of them this process may use."""
    return len(os.sched_getaffinity(0))
