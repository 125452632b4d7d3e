"""What is fuzzed: each target takes any bytes and reads them, or refuses them by an error of ours and by nothing else.

A file of a run stands in a shell with a digest, which random bytes never have: of such a file the body is fuzzed, and
put into the right shell.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from images import LAYOUT_OF_ALL, HandMade, make_layout, manifest_of
from zerostall.core import envelope, names, safetensors, values
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.manifest import RunFacts
from zerostall.errors import ZerostallError
from zerostall.wire import messages as m
from zerostall.wire.channel import Channel

Read = Callable[[bytes], object]

_SMALL = make_layout(100, 7)
_MADE = HandMade(_SMALL, 3)
_VALUES = values.encode(
    {
        "parts": {"model": ("module", {}), "more": ("container", {"a": (1, {2.5}, {1: b"x"}), "n": [None, True]})},
        "rng": None,
    }
)


@dataclass(frozen=True)
class Target:
    """Attributes:
    read: what is fuzzed. It may raise `ZerostallError` and, where it says so, `allowed`.
    seeds: inputs to begin with.
    tokens: what the fuzzer may put in.
    """

    read: Read
    seeds: tuple[bytes, ...]
    tokens: tuple[str, ...] = ()
    allowed: tuple[type[Exception], ...] = ()

    def run(self, data: bytes) -> None:
        """Any other exception than those that are allowed is a finding."""
        with contextlib.suppress(ZerostallError, *self.allowed):
            self.read(data)


def _body(sealed: bytes) -> bytes:
    start = sealed.index(b'"body":') + len(b'"body":')
    return sealed[start : sealed.rindex(b"}")]


def _sealed(decode: Read) -> Read:
    def read(data: bytes) -> None:
        with contextlib.suppress(ZerostallError):
            decode(data)
        decode(envelope.seal(data))

    return read


def _layout(data: bytes) -> None:
    layouts.decode(data, LAYOUT_OF_ALL.begins)


def _record(data: bytes) -> None:
    record = manifests.decode_record(data)
    values.decode(record.values, values.TensorRef)


def _header(data: bytes) -> None:
    safetensors.decode(data[: safetensors.header_nbytes(data[:8], len(data))], len(data))
    # The same with a length in front that fits.
    whole = len(data).to_bytes(8, "little") + data
    safetensors.decode(whole, len(whole))


def _name(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    path = names.split(text)
    assert names.join(path) == text
    names.strip_wrappers(text)


def _values(data: bytes) -> None:
    tree = values.decode(data, values.TensorRef)
    values.encode(tree)


def _messages(incoming: object) -> Read:
    def read(data: bytes) -> None:
        for whole in (data, len(data).to_bytes(4, "big") + b"\0" + data):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.sendall(whole[: 64 << 10])
                theirs.shutdown(socket.SHUT_WR)
                channel: Channel[m.Message] = Channel(ours, incoming)
                with contextlib.suppress(ZerostallError):
                    while True:
                        channel.receive()

    return read


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _import(name: str) -> Read:
    def read(data: bytes) -> None:
        from zerostall import import_file

        with _folder() as folder:
            (folder / name).write_bytes(data)
            try:
                import_file(folder / name, folder / "run", 1)
            finally:
                beside = {path.name for path in folder.iterdir()} - {name, "run"}
                assert not beside, f"something was written outside of the run: {beside}"

    return read


def _run_folder(data: bytes) -> None:
    """A step whose files vouch for each other, with other values in its record: listed, checked and loaded."""
    import zerostall

    with _folder() as folder:
        where = folder / "run"
        step = where / "step-000000000003"
        step.mkdir(parents=True)
        (where / "layouts").mkdir()
        (where / "layouts" / f"{_SMALL.digest}.json").write_bytes(layouts.encode(_SMALL))
        (step / "rank-00000.safetensors").write_bytes(_MADE.bytes)
        body = json.loads(_body(manifests.encode_record(_MADE.record)))
        text = (
            json.dumps({**body, "values": 0}, separators=(",", ":"))
            .encode()
            .replace(b'"values":0', b'"values":' + data)
        )
        record = envelope.seal(text)
        (step / "rank-00000.json").write_bytes(record)
        with contextlib.suppress(ZerostallError):
            facts = manifests.facts(manifests.decode_record(record), record)
            manifest = msgspec.structs.replace(manifest_of(_MADE.record), ranks=(facts,))
            (step / "manifest.json").write_bytes(manifests.encode_manifest(manifest))
        for snapshot in zerostall.snapshots(where):
            str(snapshot)
        with contextlib.suppress(ZerostallError):
            zerostall.verify(where, 3)
        zerostall.load(where, 3)


def _import_around(parts: Callable[[bytes], dict[str, bytes]], source: str) -> Read:
    """Imports a checkpoint of which the fuzzed bytes are one part, and all others are as they should be."""

    def read(data: bytes) -> None:
        from zerostall import import_file

        with _folder() as folder:
            there = folder / "there"
            there.mkdir()
            for name, content in parts(data).items():
                (there / name).write_bytes(content)
            import_file(there / source, folder / "run", 1)

    return read


def _archive(pickled: bytes) -> dict[str, bytes]:
    """A file of torch.save with this for its pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(range(64)))
        archive.writestr("archive/version", b"3\n")
    return {"file.pt": file.getvalue()}


def _pickle_of_torch() -> bytes:
    import torch

    file = io.BytesIO()
    torch.save({"w": torch.arange(8.0).reshape(2, 4), "n": [1, "x", 2.5, None]}, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)


def _dcp() -> dict[str, bytes]:
    """A folder of torch.distributed.checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    with _folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(4, 2), "n": {"b": torch.zeros(3)}, "step": 7}, checkpoint_id=folder / "dcp")
        return {path.name: path.read_bytes() for path in (folder / "dcp").iterdir()}


_DCP = _dcp()
_INDEX = json.dumps({"metadata": {"total_size": 107}, "weight_map": {"model.t0": "a.safetensors"}}).encode()


def _seeds_of_torch() -> tuple[bytes, ...]:
    import torch

    found = []
    for tree in ({"w": torch.ones(3, 2), "n": {"b": torch.zeros(4, dtype=torch.bfloat16)}}, {"t": torch.ones(5)[::2]}):
        file = io.BytesIO()
        torch.save(tree, file)
        found.append(file.getvalue())
    return tuple(found)


_JSON = ('"version":', '"nbytes":', '"shape":', '"dtype":', '"offset":', '"$tensor"', '"$dict"', '"$tuple"', '"$bytes"')
_KEYS = ('"__metadata__"', '"data_offsets":[0,4]', '"F32"', '"BF16"', '"F4"', '"zerostall.dtypes"', '"BOOL"')
_ASKED = (
    m.Hello(id=1, protocol=m.PROTOCOL, pid=7, where=b"/x", rank=0, world=1, rules=m.Rules(keep_last=3)),
    m.Lease(id=2, layout=layouts.encode(_SMALL), slots=3),
    m.Sealed(slot=0, record=manifests.encode_record(_MADE.record)),
    m.Discarded(slot=0, step=1, reason="x"),
    m.Find(id=4),
    m.Fetch(id=5, step=3, tier="disk"),
    m.Stop(id=6, force=False),
)
_TOLD = (m.Granted(slot=1), m.Done(id=2), m.Refused.of(3, ZerostallError("no")))


def _packed(*messages: m.Message) -> tuple[bytes, ...]:
    return tuple(map(msgspec.msgpack.encode, messages))


TARGETS: dict[str, Target] = {
    "manifest": Target(
        _sealed(manifests.decode_manifest), (_body(manifests.encode_manifest(manifest_of(_MADE.record))),), _JSON
    ),
    "record": Target(_sealed(_record), (_body(manifests.encode_record(_MADE.record)),), _JSON),
    "layout": Target(_sealed(layouts.decode), (_body(layouts.encode(_SMALL)),), _JSON),
    "cut-layout": Target(_sealed(_layout), (_body(layouts.encode(LAYOUT_OF_ALL)),), _JSON),
    "run": Target(
        _sealed(manifests.decode_run),
        (_body(manifests.encode_run(RunFacts(run="r", name="n", fingerprint="ab" * 32))),),
    ),
    "values": Target(_values, (bytes(_VALUES), b'{"$set":[1,{"$float":"nan"}]}', b'{"$range":[0,9,2]}'), _JSON),
    "name": Target(_name, (b"model.layers.0.weight", b"a[3]['x'].b", b"a\\.b")),
    "header": Target(_header, (LAYOUT_OF_ALL.header, LAYOUT_OF_ALL.header[8:].rstrip()), _KEYS),
    "from-trainer": Target(_messages(m.FromTrainer), _packed(*_ASKED)),
    "from-agent": Target(_messages(m.FromAgent), _packed(*_TOLD)),
    "import-safetensors": Target(_import("file.safetensors"), (_MADE.bytes, _MADE.bytes[:4096].rstrip()), _KEYS),
    "import-torch": Target(_import("file.pt"), _seeds_of_torch()),
    "torch-archive": Target(_import_around(_archive, "file.pt"), (_pickle_of_torch(),)),
    "dcp-metadata": Target(_import_around(lambda data: {**_DCP, ".metadata": data}, ""), (_DCP[".metadata"],)),
    "dcp-part": Target(_import_around(lambda data: {**_DCP, "__0_0.distcp": data}, ""), (_DCP["__0_0.distcp"],)),
    "index": Target(
        _import_around(
            lambda data: {"model.safetensors.index.json": data, "a.safetensors": _MADE.bytes},
            "model.safetensors.index.json",
        ),
        (_INDEX,),
        ('"weight_map":', '"../a.safetensors"', '"a.safetensors"', '"model.t1":'),
    ),
    "run-folder": Target(_run_folder, (bytes(_VALUES),), _JSON),
}
