"""GPUDirect Storage on this machine: which files cuFile takes, under which settings, and how fast it then is.

Every combination of a file system and of cuFile's settings is tried in a process of its own, for a library reads its
settings once. Where a file is taken, noise is written from the device's memory, read back into other memory of it and
compared by its checksum; beside it our reader brings the same file to host memory. What was seen is printed as JSON.
Mounts, which need root, are undone at the end; what is refused is told with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine import file_system, hardware
from zerostall import native
from zerostall.core import gds
from zerostall.core.layout import CHUNK

PATIENCE = 15.0
SETTINGS: dict[str, dict[str, object]] = {
    "as it is": {},
    "compatibility allowed": {"allow_compat_mode": True},
    "compatibility not allowed": {"allow_compat_mode": False},
    "compatibility forced": {"allow_compat_mode": True, "force_compat_mode": True},
    "peer-to-peer DMA": {"allow_compat_mode": False, "use_pci_p2pdma": True},
}
LIBRARIES = ("libmount.so", "libudev.so")  # cuFile opens them under these names, which only developers' packages have
PLACES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib64")


# ------------------------------------------------------------------------------------------------- what is there


def text_of(path: str, most: int = 2000) -> str:
    try:
        return Path(path).read_text()[:most].strip()
    except OSError as error:
        return f"({error.strerror})"


def answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return (done.stdout + done.stderr).strip()[:2000]


def machine() -> dict[str, object]:
    modules = text_of("/proc/modules", 1 << 20)
    kernel = text_of(f"/boot/config-{os.uname().release}", 1 << 20)
    return {
        **hardware(),
        "user": os.getuid(),
        "nvidia-fs": text_of("/proc/driver/nvidia-fs/version"),
        "driver": text_of("/proc/driver/nvidia/version", 200),
        "modules": sorted(line.split()[0] for line in modules.splitlines() if line.startswith(("nvidia", "nvme"))),
        "CONFIG_PCI_P2PDMA": next((line for line in kernel.splitlines() if "CONFIG_PCI_P2PDMA" in line), "not told"),
        "disks": answer("lsblk", "-o", "NAME,TYPE,FSTYPE,SIZE,TRAN,MOUNTPOINT"),
        "mkfs": [name for name in ("mkfs.ext4", "mkfs.xfs") if shutil.which(name)],
        "libraries": [path for path in gds.libraries(sys.path) if Path(path).exists()],
        "names": {name: [str(path) for place in PLACES for path in Path(place).glob(f"{name}*")] for name in LIBRARIES},
        "cufile.json": text_of("/etc/cufile.json", 400),
    }


# ------------------------------------------------------------------------------------------------- where to write


@contextlib.contextmanager
def folders(scratch: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Name → folder, and name → why there is none."""
    found, refused = {"here": str(Path.cwd()), "temporary": str(scratch)}, {}
    if Path("/dev/shm").is_dir():
        found["/dev/shm"] = "/dev/shm"
    with contextlib.ExitStack() as stack:

        def mount(name: str, *arguments: str) -> None:
            target = scratch / f"mounted {name}".replace(" ", "-")
            target.mkdir()
            told = subprocess.run(["mount", *arguments, str(target)], capture_output=True, text=True, check=False)
            if told.returncode:
                refused[name] = told.stderr.strip() or f"mount ended with {told.returncode}"
                return
            stack.callback(lambda: subprocess.run(["umount", "-l", str(target)], check=False))
            found[name] = str(target)

        mount("tmpfs", "-t", "tmpfs", "-o", "size=1g", "none")
        for kind in ("ext4", "xfs"):
            image = scratch / f"{kind}.image"
            with image.open("wb") as file:
                file.truncate(1 << 30)
            made = answer(f"mkfs.{kind}", "-q", str(image)) if shutil.which(f"mkfs.{kind}") else f"no mkfs.{kind}"
            if made:
                refused[f"{kind} on a loop"] = made
                continue
            options = "loop,data=ordered" if kind == "ext4" else "loop"
            mount(f"{kind} on a loop", "-t", kind, "-o", options, str(image))
        for part in ("lower", "upper", "work"):
            (scratch / part).mkdir()
        layers = f"lowerdir={scratch}/lower,upperdir={scratch}/upper,workdir={scratch}/work"
        mount("overlay", "-t", "overlay", "-o", layers, "none")
        yield found, refused


@contextlib.contextmanager
def own_names(scratch: Path) -> Iterator[str]:
    """A folder in which the libraries that cuFile opens have the names by which it does; empty where they have."""
    links = scratch / "names"
    links.mkdir()
    for name in LIBRARIES:
        versioned = sorted(path for place in PLACES for path in Path(place).glob(f"{name}.[0-9]"))
        if versioned and not any(Path(place, name).exists() for place in PLACES):
            (links / name).symlink_to(versioned[0])
    yield str(links) if any(links.iterdir()) else ""


@contextlib.contextmanager
def told_by_udev(folder_of: dict[str, str]) -> Iterator[list[str]]:
    """What udev would know of the disks below the folders, where no udevd has ever run: cuFile asks its database.

    Yields the files that were made for that; they are removed again.
    """
    data = Path("/run/udev/data")
    made: list[Path] = []
    with contextlib.suppress(PermissionError):
        data.mkdir(parents=True, exist_ok=True)
        for folder in folder_of.values():
            device = os.stat(folder).st_dev  # noqa: PTH116
            facts = data / f"b{os.major(device)}:{os.minor(device)}"
            if os.major(device) and not facts.exists():
                kind = file_system(Path(folder))
                facts.write_text(
                    f"I:1\nE:ID_FS_TYPE={kind}\nE:ID_FS_USAGE=filesystem\nE:ID_FS_VERSION=1.0\nG:systemd\n"
                )
                made.append(facts)
    try:
        yield [path.name for path in made]
    finally:
        for path in made:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- one process


class Memory:
    """Memory of a device, by the driver alone: importing torch would take longer than all the rest."""

    def __init__(self, nbytes: int) -> None:
        self._cuda = ctypes.CDLL(os.environ.get("ZEROSTALL_LIBCUDA") or "libcuda.so.1")
        context = ctypes.c_void_p()
        self._do("cuInit", 0)
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._do("cuCtxPushCurrent_v2", context)
        at = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(nbytes))
        self.address, self.nbytes = at.value, nbytes

    def _do(self, function: str, *arguments: object) -> None:
        if status := getattr(self._cuda, function)(*arguments):
            raise SystemExit(f"{function}: error {status}")

    def fill(self, data: bytes) -> None:
        self._copy("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.address), data, ctypes.c_size_t(len(data)))

    def bytes(self) -> bytes:
        data = ctypes.create_string_buffer(self.nbytes)
        self._copy("cuMemcpyDtoHAsync_v2", data, ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
        return data.raw

    def _copy(self, function: str, *arguments: object) -> None:
        self._do(function, *arguments, None)
        self._do("cuStreamSynchronize", None)


def child(folder_of: dict[str, str], nbytes: int) -> dict[str, object]:
    """What cuFile does with a file in each folder, under the settings of this process."""
    device = native.Device(0)
    try:
        facts = native.cufile_open(device, gds.libraries(sys.path))
    except Exception as error:  # noqa: BLE001 - what was seen is told
        return {"cuFile": str(error)}
    pool = native.Pool("gds", 8)
    here, there = Memory(nbytes), Memory(nbytes)
    data = os.urandom(1 << 20) * (nbytes >> 20)
    here.fill(data)
    registered = [native.RegisteredMemory(device, one.address, nbytes) for one in (here, there)]
    seen: dict[str, object] = {
        "cuFile": {name: getattr(facts, name) for name in ("library", "version", "nvfs", "p2p", "compat", "direct")},
        "memory": [one.problem or "registered" for one in registered],
    }
    for name, folder in folder_of.items():
        path = Path(folder) / f".zerostall-gds-{os.getpid()}"
        found = seen[name] = {"file system": file_system(Path(folder))}
        try:
            there_and_back(path, device, pool, here, there, data, found)
        except Exception as error:  # noqa: BLE001 - as above
            found["refused"] = f"{type(error).__name__}: {error}"
        finally:
            path.unlink(missing_ok=True)
    del registered
    return seen


def there_and_back(
    path: Path, device: native.Device, pool: native.Pool, here: Memory, there: Memory, data: bytes,
    found: dict[str, object],
) -> None:  # fmt: skip
    """Write, read back, compare; `found` is told as far as it comes."""
    nbytes = here.nbytes

    def timed(name: str, start: float) -> None:
        found[f"{name} GB/s"] = round(nbytes / (time.perf_counter() - start) / 1e9, 2)

    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        file = native.DeviceFile(device, fd)
        found["taken"] = True
        start = time.perf_counter()
        native.DeviceTransfer(pool, file, here.address, nbytes, offset=0, write=True).wait(PATIENCE)
        os.fsync(fd)
        timed("write", start)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        there.fill(bytes(nbytes))
        start = time.perf_counter()
        native.DeviceTransfer(pool, file, there.address, nbytes, offset=0, write=False).wait(PATIENCE)
        timed("read", start)
        found["same"] = native.crc32c(there.bytes()) == native.crc32c(data) == native.crc32c(path.read_bytes())
        del file
        host = native.Segment("host", nbytes)
        host.touch(1)
        sums = [native.crc32c(data[at : at + CHUNK]) for at in range(0, nbytes, CHUNK)]
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        native.FileRead(pool, fd, host.address, nbytes, chunk_bytes=CHUNK, checksums=sums, direct=True).wait(PATIENCE)
        timed("read to host memory, checked", start)
    finally:
        os.close(fd)


# ---------------------------------------------------------------------------------------------------- all of them


def attempt(
    settings: dict[str, object], scratch: Path, names: str, folder_of: dict[str, str], nbytes: int, patience: float
) -> object:
    log, config = scratch / "cufile.log", scratch / "cufile.json"
    log.unlink(missing_ok=True)
    environment = {**os.environ, "CUFILE_LOGFILE_PATH": str(log), "CUFILE_LOGGING_LEVEL": "INFO"}
    if settings:
        config.write_text(json.dumps({"logging": {"level": "INFO"}, "properties": settings}))
        environment["CUFILE_ENV_PATH_JSON"] = str(config)
    for name, variable in (
        ("force_compat_mode", "CUFILE_FORCE_COMPAT_MODE"),
        ("use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA"),
    ):
        if settings.get(name):
            environment[variable] = "true"
    if names:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [names, environment.get("LD_LIBRARY_PATH")]))
    command = [
        sys.executable,
        "-m",
        "benchmarks.gds",
        "--child",
        json.dumps(folder_of),
        "--megabytes",
        str(nbytes >> 20),
    ]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience, check=False)
        seen = (
            json.loads(done.stdout) if done.returncode == 0 else f"ended with {done.returncode}: {done.stderr[-600:]}"
        )
    except subprocess.TimeoutExpired:
        seen = f"no end after {patience:.0f} s"
    said = [
        line.split("] ", 1)[-1]
        for line in text_of(str(log), 1 << 20).splitlines()
        if " WARN" in line or " ERROR" in line
    ]
    return {"seen": seen, "cuFile said": list(dict.fromkeys(said))[-12:]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--megabytes", type=int, default=256, help="size of the file in MiB")
    options.add_argument("--seconds", type=float, default=55.0, help="begin nothing after that long")
    options.add_argument("--out", type=Path, help="also write what was seen to this file")
    options.add_argument("--child", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    nbytes = arguments.megabytes << 20
    if arguments.child:
        print(json.dumps(child(json.loads(arguments.child), nbytes)))
        return
    start = time.monotonic()
    seen: dict[str, object] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="zerostall-gds-") as text, contextlib.ExitStack() as stack:
        scratch = Path(text)
        found, refused = stack.enter_context(folders(scratch))
        names = stack.enter_context(own_names(scratch))
        seen["folders"], seen["no folder"] = found, refused

        def left() -> float:
            return arguments.seconds - (time.monotonic() - start)

        seen["as it is"] = attempt({}, scratch, "", found, nbytes, min(PATIENCE, left()))
        # The second time with all that cuFile asks the system for, and does not find in a container.
        seen["names made"] = sorted(path.name for path in Path(names).iterdir()) if names else []
        seen["facts made for udev"] = stack.enter_context(told_by_udev(found))
        for label, settings in SETTINGS.items():
            seen[f"{label}, with what was made"] = (
                attempt(settings, scratch, names, found, nbytes, min(PATIENCE, left()))
                if left() > 2
                else "no time left"
            )
    text = json.dumps(seen, indent=1, ensure_ascii=False, default=str)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
