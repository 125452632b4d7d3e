"""`zerostall doctor`: what this machine can do, and why not."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

import zerostall
from zerostall import config, memory, native
from zerostall.agent import transports
from zerostall.cli import nvidia
from zerostall.cli.arguments import Json
from zerostall.cli.output import emit_json, emit_table, size
from zerostall.core import gds, vaults
from zerostall.core.copiers import choose
from zerostall.errors import CapacityError, ZerostallError
from zerostall.flow import straight
from zerostall.flow.node_agent import ask_status
from zerostall.native.topology import topology
from zerostall.tiers.files import real
from zerostall.wire import messages as m
from zerostall.wire import rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator

Verdict = Literal["yes", "limited", "no"]
_SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_CRC_BYTES = 16 << 20
_HUGE_PAGES = 4 << 20


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        verdict: "limited" works more slowly or with less; "no" does not work.
        detail: what was found, and for anything but "yes" why, and what to do.
    """

    name: str
    verdict: Verdict
    detail: str


def doctor(
    where: Annotated[Path, typer.Argument(help="folder to try writing in")] = Path(),
    json: Json = False,
) -> None:
    """Look at this machine: native code, memory, agent, disk, torch. Exit status 1 if something does not work."""
    found = list(examine(where))
    if json:
        emit_json(found)
    else:
        rows = [(finding.name, finding.verdict, finding.detail) for finding in found]
        emit_table(("part", "works", "what was found"), rows)
    if any(finding.verdict == "no" for finding in found):
        raise typer.Exit(1)


def examine(where: Path) -> Iterator[Finding]:
    """Every finding, one after the other."""
    yield _versions()
    yield _torch()
    yield _checksums()
    yield _segments()
    yield _memory()
    yield _huge_pages()
    yield _locked()
    yield from _agent()
    yield between_nodes()
    yield object_stores()
    yield from _disk(where)
    yield from _gpu(where)


def _versions() -> Finding:
    ours = zerostall.__version__
    system = f"{platform.system()} {platform.release()} ({platform.machine()})"
    return Finding("zerostall", "yes", f"{ours}, Python {platform.python_version()}, {system}")


def _torch() -> Finding:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", "limited", "not installed: training cannot save here; these commands work without it")
    return Finding("torch", "yes", f"{version}{_torch_build()}")


def _torch_build() -> str:
    """What CUDA torch was built with, from its version file: importing torch would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ", installed but not found"
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    cuda = re.search(r"^cuda\b[^=\n]*=\s*'([^']+)'", text, re.MULTILINE)
    return f", built with CUDA {cuda[1]}" if cuda else ", built without CUDA"


def _checksums() -> Finding:
    data = bytes(_CRC_BYTES)
    rate = max(_CRC_BYTES / _seconds(data) for _ in range(3)) / 1e9
    copiers = choose(config.cores(), chosen=config.copy_threads())
    threads = f"{rate:.1f} GB/s, copy threads: {copiers.threads}, since {copiers.reason}"
    if native.CRC_HARDWARE:
        return Finding("checksums", "yes", f"CRC-32C by the processor's instruction; {threads}")
    return Finding("checksums", "limited", f"CRC-32C by table, slower: this processor has no instruction; {threads}")


def _seconds(data: bytes) -> float:
    start = time.perf_counter()
    native.crc32c(data)
    return max(time.perf_counter() - start, 1e-9)


def _segments() -> Finding:
    try:
        native.Segment("zerostall-doctor", 1 << 20).close()
    except ZerostallError as error:
        return Finding("shared memory", "no", f"memfd: {error}")
    return Finding("shared memory", "yes", "memfd, sealed; /dev/shm is not used, however small it is")


def _memory() -> Finding:
    settings = config.AgentSettings.from_environment()
    return Finding("memory", "yes", f"the agent lends up to {size(settings.host_budget)} of {size(memory.limit())}")


def _agent() -> Iterator[Finding]:
    folder = config.runtime_dir()
    try:
        if folder.exists():
            rendezvous.private_folder(folder)
        channel = rendezvous.connect(folder)
        if channel is None:
            yield Finding("agent", "yes", f"none runs in {folder}; training starts one by itself")
            return
        report = ask_status(channel)
        channel.close()
    except ZerostallError as error:
        yield Finding("agent", "no", str(error).replace("\n", " "))
        return
    yield _agent_found(report)
    for who, fallback in fallbacks_of(report):
        times = f" ({fallback.count} times)" if fallback.count > 1 else ""
        yield Finding("fallback", "limited", f"{who}: {fallback.text}{times}")


def between_nodes() -> Finding:
    """Which way images go from agent to agent."""
    try:
        choice = transports.chosen(config.transport())
    except (ValueError, ZerostallError) as error:
        return Finding("node to node", "no", str(error).replace("\n", " "))
    return Finding("node to node", "yes", f"{'NIXL' if choice.nixl else 'plain TCP'}: {choice.reason}")


def object_stores() -> Finding:
    """Whether there is a client for them, and what becomes of an upload that breaks off."""
    try:
        version = importlib.metadata.version("obstore")
    except importlib.metadata.PackageNotFoundError:
        return Finding("object stores", "limited", "obstore is not installed: pip install 'zerostall[remote]'")
    resumed = "an upload that breaks off goes on to s3://, to az:// with a key or SAS token; to gs:// it begins anew"
    return Finding("object stores", "yes", f"obstore {version}; {resumed} (docs/remote.md)")


def fallbacks_of(report: m.Report) -> list[tuple[str, m.Fallback]]:
    """What processes had to fall back to, each with who. A process tells the same to all of its runs: it is said once.

    Of a process that has ended its number is not known any more; the same words are taken for the same process then.
    """
    told: dict[tuple[int | None, str], tuple[list[str], m.Fallback]] = {}
    for rank in report.ranks:
        for fallback in rank.fallbacks:
            names, newest = told.setdefault((rank.trainer_pid, fallback.text), ([], fallback))
            names.append(f"rank {rank.rank} of {rank.where}")
            if fallback.count > newest.count:
                told[rank.trainer_pid, fallback.text] = names, fallback
    found = [("the agent", fallback) for fallback in report.fallbacks]
    for (pid, _), (names, fallback) in told.items():
        process = f"process {pid}, " if pid is not None and len(names) > 1 else ""
        found.append((process + ", ".join(names), fallback))
    return found


def _agent_found(report: m.Report) -> Finding:
    lent = f"{size(report.host_bytes)} of {size(report.host_budget)} lent"
    if report.version != zerostall.__version__:
        return Finding(
            "agent", "limited", f"{report.pid} runs version {report.version}; stop it to get this one; {lent}"
        )
    failing = [f"{rank.where}: {rank.last_error}" for rank in report.ranks if rank.last_error]
    if failing:
        return Finding("agent", "limited", f"{report.pid}, {lent}; {'; '.join(failing)}")
    return Finding("agent", "yes", f"{report.pid}, up {report.uptime:.0f} s, {lent}")


def _disk(where: Path) -> Iterator[Finding]:
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix=".zerostall-doctor-") as file:
            free = size(shutil.disk_usage(where).free)
            yield Finding("disk", "yes", f"{real(where)} can be written, {free} free")
            yield _direct(Path(file.name))
    except OSError as error:
        yield Finding("disk", "no", f"{real(where)} cannot be written: {error.strerror}")


def _direct(path: Path) -> Finding:
    """Tries one aligned write past the page cache."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.pwrite(fd, page, 0)
        finally:
            os.close(fd)
    except OSError as error:
        return Finding(
            "direct I/O", "limited", f"this file system refuses O_DIRECT ({error.strerror}): plain writes are used"
        )
    return Finding("direct I/O", "yes", "aligned O_DIRECT works here")


def _huge_pages() -> Finding:
    with contextlib.suppress(CapacityError):
        segment = native.Segment("zerostall-doctor", _HUGE_PAGES)
        huge = segment.huge
        segment.close()
        if huge:
            return Finding("huge pages", "yes", "shared memory gets them")
    try:
        text = _SHMEM_PAGES.read_text()
    except OSError as error:
        return Finding("huge pages", "limited", f"not for shared memory: {error.strerror}")
    mode = text[text.find("[") + 1 : text.find("]")]
    if mode in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", "yes", f"for shared memory: {mode}")
    why = f"{mode} in {_SHMEM_PAGES}, and none on request (Linux 6.7)"
    return Finding("huge pages", "limited", f"not for shared memory: {why}; it costs the processor more")


def _locked() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "yes", "no limit")
    return Finding("locked memory", "yes", f"limit {size(soft)}; nothing locks memory in this version")


def _gpu(where: Path) -> Iterator[Finding]:
    version = nvidia.driver()
    if not version:
        yield Finding("GPU", "limited", "no NVIDIA driver is loaded: state is captured from CPU memory")
        return
    names, problem = nvidia.devices()
    found = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    words = "; ".join(filter(None, [f"driver {version}", found, problem]))
    yield Finding("GPU", "limited" if problem else "yes", words)
    if names:
        yield from gpu_neighbours()
        yield _gpu_storage(where)


def gpu_neighbours() -> Iterator[Finding]:
    """Of each GPU, in whose memory its saves with `peer=True` go; and whether NVLink multicast could be had."""
    try:
        gpus, links = topology()
    except ZerostallError as error:
        yield Finding("GPU memory", "limited", f"who reaches whose is not known: {error}")
        return
    peers = vaults.place(list(gpus), links)
    mirrors = vaults.mirror(list(gpus), links, peers)
    for uuid, choice in peers.items():
        facts = gpus[uuid]
        lines = nvidia.nvlinks(uuid)
        itself = f"{facts.name}, {uuid}, {lines} NVLink lines" if lines else f"{facts.name}, {uuid}"
        if choice.gpu is None:
            yield Finding(
                f"GPU {facts.ordinal}", "limited", f"{itself}; peer=True saves to host memory: {choice.reason}"
            )
        else:
            whose = f"GPU {gpus[choice.gpu].ordinal}"
            words = f"{itself}; peer=True saves to {whose} {choice.reason}"
            if (second := mirrors[uuid]).gpu is not None:
                words += f"; Peer(copies=2) mirrors on GPU {gpus[second.gpu].ordinal}, {second.reason}"
            elif len(gpus) > 2:
                words += f"; Peer(copies=2) keeps one copy: {second.reason}"
            yield Finding(f"GPU {facts.ordinal}", "yes", words)
    able = ", ".join(f"GPU {facts.ordinal}" for facts in gpus.values() if facts.multicast)
    words = f"{able} could; nothing here uses it" if able else "no GPU has it; nothing here would use it"
    yield Finding("NVLink multicast", "yes" if able else "limited", words)


def _gpu_storage(where: Path) -> Finding:
    """Whether cuFile takes a file of that folder. Host memory is as good where it does not, only less quick."""
    try:
        device = native.Device(0)
        try:
            chosen = straight.choice(device)
            problem = "" if chosen.use else chosen.reason
            if not problem:
                with tempfile.NamedTemporaryFile(dir=where, prefix=".zerostall-doctor-") as file:
                    problem = straight.refusal(device, Path(file.name))
        finally:
            device.close()
    except (OSError, ZerostallError) as error:
        chosen, problem = None, str(error)
    if problem or chosen is None:
        told = "; ".join(filter(None, [problem, gds.advice(problem)]))
        return Finding("GPU storage", "limited", f"files reach a GPU, and saves the disk, through host memory: {told}")
    words = "files go straight to a GPU, and with peer=True saves straight from one to disk"
    return Finding("GPU storage", "yes", f"{words}: {chosen.reason}")
