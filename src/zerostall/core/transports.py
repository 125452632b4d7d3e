"""Which way images go from agent to agent: decided from what was found, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.errors import CapabilityError

if TYPE_CHECKING:
    from zerostall.config import Transport


@dataclass(frozen=True, slots=True)
class Found:
    """What a machine has.

    Attributes:
        problem: why NIXL cannot be had; empty where it can.
        rdma: the network devices that read another machine's memory by themselves, those with a link.
    """

    problem: str = ""
    rdma: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether NIXL carries images, and why or why not; `shared`: by memory that both agents of a machine share."""

    nixl: bool
    reason: str
    shared: bool = False


def choose(setting: Transport, found: Found) -> Choice:
    """Decide for a machine.

    Over TCP UCX needs more of the processor than a plain connection does, and its port asks nobody for the token. So
    by itself it is taken only where it has something that plain TCP has not.

    Raises:
        CapabilityError: it is asked for and cannot be had.
    """
    devices = ", ".join(found.rdma)
    if setting == "tcp":
        return Choice(False, "ZEROSTALL_TRANSPORT says so")
    if setting in ("nixl", "shm"):
        if found.problem:
            raise CapabilityError(
                f"ZEROSTALL_TRANSPORT={setting} cannot be had here: {found.problem}",
                hint="pip install 'zerostall[nixl]', or leave ZEROSTALL_TRANSPORT at auto",
            )
        if setting == "shm":
            reason = "ZEROSTALL_TRANSPORT says so; shared memory, which reaches agents of this machine"
            return Choice(True, reason, shared=True)
        return Choice(True, f"ZEROSTALL_TRANSPORT says so; {f'RDMA by {devices}' if devices else 'UCX over TCP'}")
    if not found.rdma:
        return Choice(False, "there is no RDMA device with a link here")
    if found.problem:
        return Choice(False, f"there is RDMA by {devices}, but {found.problem}")
    return Choice(True, f"RDMA by {devices}")


def ucx_settings(found: Found, device: str, *, shared: bool = False) -> dict[str, str]:
    """UCX's own variables, for those that the environment leaves open: which ways it may take.

    Without bounds it listens on every address of the machine. With RDMA or `shared` memory it needs no port at all;
    else it gets the network device of the agent's own address (`device`, empty for all) and no other.
    """
    if shared:
        return {"UCX_TLS": "posix,cma,self"}
    if found.rdma:
        return {"UCX_TLS": "ib,self"}
    return {"UCX_TLS": "tcp,self", **({"UCX_NET_DEVICES": device} if device else {})}
