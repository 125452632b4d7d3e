"""`zerostall doctor`: what this machine can do, and why not."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

import zerostall
from zerostall import config, native
from zerostall.cli.agent import ask_status
from zerostall.cli.output import Json, console, emit_json, size
from zerostall.errors import ZerostallError
from zerostall.wire import rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator

Verdict = Literal["yes", "limited", "no"]
_MARKS = {"yes": "[green]yes[/]", "limited": "[yellow]limited[/]", "no": "[red]no[/]"}


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
        width = max(len(finding.name) for finding in found)
        for finding in found:
            padding = " " * (8 - len(finding.verdict))
            console().print(f"{finding.name:<{width}}  {_MARKS[finding.verdict]}{padding} {finding.detail}")
    if any(finding.verdict == "no" for finding in found):
        raise typer.Exit(1)


def examine(where: Path) -> Iterator[Finding]:
    """Every finding, one after the other."""
    yield _versions()
    yield _torch()
    yield _checksums()
    yield _segments()
    yield _memory()
    yield _agent()
    yield from _disk(where)
    yield _gpu()


def _versions() -> Finding:
    ours = zerostall.__version__
    system = f"{platform.system()} {platform.release()} ({platform.machine()})"
    return Finding("zerostall", "yes", f"{ours}, Python {platform.python_version()}, {system}")


def _torch() -> Finding:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", "limited", "not installed: training cannot save here; these commands work without it")
    return Finding("torch", "yes", version)


def _checksums() -> Finding:
    threads = f"{config.copy_threads()} copy threads on {len(os.sched_getaffinity(0))} cores"
    if native.CRC_HARDWARE:
        return Finding("checksums", "yes", f"CRC-32C by the processor's instruction; {threads}")
    return Finding("checksums", "limited", f"CRC-32C by table, slower: this processor has no instruction; {threads}")


def _segments() -> Finding:
    try:
        native.Segment("zerostall-doctor", 1 << 20).close()
    except ZerostallError as error:
        return Finding("shared memory", "no", f"memfd: {error}")
    return Finding("shared memory", "yes", "memfd, sealed; the size of /dev/shm does not matter")


def _memory() -> Finding:
    settings = config.AgentSettings.from_environment()
    return Finding(
        "memory", "yes", f"the agent lends up to {size(settings.host_budget)} of {size(config.memory_limit())}"
    )


def _agent() -> Finding:
    folder = config.runtime_dir()
    try:
        if folder.exists():
            rendezvous.private_folder(folder)
        channel = rendezvous.connect(folder)
        if channel is None:
            return Finding("agent", "yes", f"none runs in {folder}; training starts one by itself")
        report = ask_status(channel)
        channel.close()
    except ZerostallError as error:
        return Finding("agent", "no", str(error).replace("\n", " "))
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
            yield Finding("disk", "yes", f"{where.resolve()} can be written, {free} free")
            yield _direct(Path(file.name))
    except OSError as error:
        yield Finding("disk", "no", f"{where.resolve()} cannot be written: {error.strerror}")


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


def _gpu() -> Finding:
    driver = Path("/proc/driver/nvidia/version")
    if not driver.exists():
        return Finding("GPU", "limited", "no NVIDIA driver: state is captured from CPU memory")
    return Finding("GPU", "limited", "there is an NVIDIA driver, but this version captures from CPU memory only")
