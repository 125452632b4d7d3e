"""Writes the golden files of the current format: `python tests/golden/make.py FOLDER`.

The files under `v1/`, `v2/`, `v3/` and `disks/` are checked in and never change; a new format version gets a folder of
its own. Everything in them is small enough to be checked by hand. Step 7 has one rank, every kind of small value, an
alias and types that safetensors lacks; its chunks are of 4096 bytes, so that there are several. Step 12 has two ranks
with half a tensor each. Step 20, the one of version 3, has two ranks with half a tensor and one of their own each.
"""

from __future__ import annotations

import argparse
import datetime
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from uuid import UUID

from zerostall.core import checksum, disks, layout, manifest, steps, values
from zerostall.core.layout import Layout, Shard, View
from zerostall.core.manifest import Manifest, Record, RunFacts
from zerostall.core.values import TensorRef

RUN = "0123456789abcdef0123456789abcdef"
CREATED = 1700000000.25
NOT_A_NUMBER = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]

VALUES = {
    "none": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**70)],
    "floats": [0.1, 1e300, 5e-324, -0.0, float("inf"), float("-inf"), NOT_A_NUMBER],
    "complex": complex(1.5, -0.0),
    "texts": ["", 'é \u2028 \x7f \n " \\ /', "\ud800", "$int"],
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"abc"),
    "tuple": (1, (2,), []),
    "keys": {1: "integer", "1": "text", (1, 2): "tuple", None: "none", 2.5: "float", False: "boolean", "$": "dollar"},
    "set": {3, 1, 2},
    "frozenset": frozenset({"a"}),
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, {"a": [1]}),
    "counter": Counter("aab"),
    "deque": deque([1, 2], maxlen=3),
    "range": range(1, 10, 3),
    "slice": slice(None, 5, 2),
    "ellipsis": ...,
    "paths": [PurePosixPath("a/b"), PureWindowsPath("c:\\x")],
    "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.timezone(datetime.timedelta(hours=1), "CET")),
    "naive": datetime.datetime(2024, 2, 29),
    "date": datetime.date(2024, 2, 29),
    "time": datetime.time(23, 59, 59, 999999),
    "timedelta": datetime.timedelta(-1, 5, 7),
    "decimal": Decimal("-1.10"),
    "fraction": Fraction(-3, 7),
    "uuid": UUID(int=5),
    "namespace": SimpleNamespace(a=1),
    "arguments": argparse.Namespace(b=2),
}

TENSORS: dict[str, tuple[str, tuple[int, ...], bytes]] = {
    "model.weight": ("float32", (2, 3), struct.pack("<6f", 0, 1, 2, 3, 4, 5)),
    "model.scale": ("bfloat16", (), bytes.fromhex("c03f")),
    "state.phase": ("complex64", (2,), struct.pack("<4f", 0, 1, 2, -3)),
    "state.count": ("int64", (1,), struct.pack("<q", -2)),
    "state.mask": ("bool", (3,), b"\x01\x00\x01"),
    "state.codes": ("float8_e4m3fnuz", (4,), b"\x00\x01\x80\xff"),
    "state.empty": ("float32", (0, 4), b""),
    r"state.a\.b": ("uint8", (2,), b"\x07\x08"),
}
VIEW = View("model.turned", "model.weight", "float32", (3, 2), (1, 3), 0)
OWN = {0: b"\x05", 1: b"\x06"}
HALVES = {0: struct.pack("<2h", 1, 2), 1: struct.pack("<2h", 3, 4)}


def crc32c(data: bytes) -> int:
    """CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def image_of(made: Layout, contents: dict[str, bytes]) -> bytes:
    """Return an image: the header, then the tensors in the layout's order."""
    return made.header + b"".join(contents[entry.name] for entry in made.entries)


def record_of(image: bytes, made: Layout, step: int, rank: int, world: int, chunk: int, tree: object) -> Record:
    """Return the record of an image."""
    sums = [crc32c(image[at : at + chunk]) for at in range(0, len(image), chunk)]
    return Record(
        run=RUN,
        step=step,
        rank=rank,
        world=world,
        layout=made.digest,
        begins=made.begins,
        nbytes=len(image),
        chunk_bytes=chunk,
        checksums=sums,
        checksum=checksum.whole(sums, len(image), chunk),
        values=values.encode(tree),
        metric=0.5 if step == 7 else None,
        created=CREATED,
    )


def files() -> dict[str, bytes]:
    """Return every file, by its path."""
    made: dict[str, bytes] = {}
    shards = [Shard.whole(name, dtype, shape) for name, (dtype, shape, _) in TENSORS.items()]
    one = layout.build(shards, [VIEW])
    state = {name.split(".")[1]: TensorRef(name) for name in TENSORS if name.startswith("state.") and "\\" not in name}
    tree = {
        "parts": {"model": ("module", {}), "state": ("container", VALUES | state | {"a.b": TensorRef(r"state.a\.b")})},
        "rng": None,
    }
    image = image_of(one, {name: data for name, (_, _, data) in TENSORS.items()})
    add(made, one, [(image, record_of(image, one, 7, 0, 1, 4096, tree))])

    ranks = []
    for rank, half in HALVES.items():
        part = layout.build([Shard("model.table", "int16", (1, 2), (2, 2), (rank, 0))])
        image = image_of(part, {"model.table": half})
        tree = {"parts": {"model": ("module", {})}, "rng": None}
        ranks.append((image, record_of(image, part, 12, rank, 2, layout.CHUNK, tree)))
        made[f"{steps.LAYOUTS}/{steps.layout_file(part.digest)}"] = layout.encode(part)
    add(made, None, ranks)
    facts = RunFacts(run=RUN, name="golden", fingerprint=layout.fingerprint([one]), created=CREATED)
    made[steps.RUN] = manifest.encode_run(facts)
    return made


def own_files() -> dict[str, bytes]:
    """Return every file of the run whose ranks have tensors of their own, by its path."""
    made: dict[str, bytes] = {}
    ranks = []
    for rank, half in HALVES.items():
        cut = Shard("model.table", "int16", (1, 2), (2, 2), (rank, 0))
        own = Shard.whole("model.expert[=own]", "uint8", (1,))
        part = layout.build([cut, own], [View("model.same[=own]", own.name, "uint8", (1,), (1,), 0)])
        image = image_of(part, {cut.name: half, own.name: OWN[rank]})
        tree = {"parts": {"model": ("module", {})}, "rng": None}
        ranks.append((image, record_of(image, part, 20, rank, 2, layout.CHUNK, tree)))
    add(made, part, ranks)
    facts = RunFacts(run=RUN, name="golden", fingerprint=layout.fingerprint([part]), created=CREATED)
    made[steps.RUN] = manifest.encode_run(facts)
    return made


def disk_files() -> dict[str, bytes]:
    """What tells of images on other disks; the first is in the run's folder, the second in the one that it names."""
    return {
        steps.DISKS: disks.encode(disks.RunDisks(run=RUN, folders=("/mnt/nvme1/golden", "/mnt/nvme2/a folder/é"))),
        steps.DISK: disks.encode(disks.DiskOf(run=RUN)),
    }


def add(made: dict[str, bytes], shared: Layout | None, ranks: list[tuple[bytes, Record]]) -> None:
    """Add the files of a step."""
    first = ranks[0][1]
    folder = steps.step_folder(first.step)
    if shared is not None:
        made[f"{steps.LAYOUTS}/{steps.layout_file(shared.digest)}"] = layout.encode(shared)
    facts = []
    for image, record in ranks:
        data = manifest.encode_record(record)
        made[f"{folder}/{steps.image_file(record.rank)}"] = image
        made[f"{folder}/{steps.record_file(record.rank)}"] = data
        facts.append(manifest.facts(record, data))
    made[f"{folder}/{steps.MANIFEST}"] = manifest.encode_manifest(
        Manifest(
            run=RUN,
            step=first.step,
            world=first.world,
            ranks=tuple(facts),
            metric=first.metric,
            created=CREATED,
        )
    )


def main(folder: Path) -> None:
    made = {f"v2/{name}": data for name, data in files().items()}
    made |= {f"v3/{name}": data for name, data in own_files().items()}
    made |= {f"disks/{name}": data for name, data in disk_files().items()}
    for name, data in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{len(data):6} {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
