"""Listing, verifying, comparing and pinning the steps of a folder, damaged ones included."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import manifest, values
from zerostall.core.contents import contents, natural, runs
from zerostall.core.layout import CHUNK, Shard, View
from zerostall.core.leaves import leaves
from zerostall.core.values import TensorRef
from zerostall.errors import CapabilityError, CorruptError, SnapshotNotFoundError
from zerostall.flow import catalog, importing, inspection
from zerostall.flow.catalog import Snapshot, Verdict
from zerostall.flow.difference import changed_elements
from zerostall.telemetry import moment
from zerostall.tiers.disk import DiskTier


@pytest.fixture
def pool():
    pool = native.Pool("test", 1)
    yield pool
    pool.close()


def save(where: Path, pool: native.Pool, step: int, *sizes: int, seed: int | None = None) -> HandMade:
    made = HandMade(make_layout(*(sizes or (5000, 70_000))), step, seed=seed)
    disk = DiskTier(where, pool)
    disk.put(made.image)
    disk.commit(manifest_of(made.record))
    return made


def store(where: Path, step: int, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], small: object = None) -> None:
    """A step of these tensors: name → (type, shape, bytes)."""
    layout = layouts.build([Shard.whole(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()])

    def fill(segment: native.Segment, pool: native.Pool) -> None:
        view = segment.view(0, layout.nbytes)
        view[: len(layout.header)] = layout.header
        for entry in layout.entries:
            view[entry.offset : entry.offset + entry.nbytes] = tensors[entry.name][2]

    importing.store(where, step, layout, values.encode({"parts": small or {}, "rng": None}), fill)


def image(where: Path, step: int) -> Path:
    return where / f"step-{step:012d}" / "rank-00000.safetensors"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


# ---------------------------------------------------------------------------------------------------- snapshots


def test_steps_rise_and_tell_of_themselves(tmp_path: Path, pool: native.Pool) -> None:
    for step in (30, 4, 100):
        save(tmp_path, pool, step)
    catalog.pin(tmp_path, 4)
    found = catalog.snapshots(tmp_path)
    assert [snapshot.step for snapshot in found] == [4, 30, 100]
    assert [snapshot.pinned for snapshot in found] == [True, False, False]
    assert all(s.clean and s.world == 1 and s.nbytes == 4096 + 75_000 for s in found)


def test_images_are_not_opened_to_tell_what_is_in_them(
    tmp_path: Path, pool: native.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, pool, step)
    opened: list[str] = []
    real = os.open

    def watching(path: str | os.PathLike[str], *args: object, **options: object) -> int:
        opened.append(Path(path).name)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", watching)
    assert len(catalog.snapshots(tmp_path)) == 3
    assert inspection.inspect(tmp_path, 2).ranks[0].tensors
    assert opened and not [name for name in opened if name.endswith(".safetensors")]
    assert sum(name.startswith("rank-") for name in opened) == 1  # one record, of the step that was asked for


def test_what_is_in_a_step_of_100_000_tensors_is_told_by_what_lies_beside_its_image(
    tmp_path: Path, pool: native.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"m.layers.{n // 100}.w{n % 100}" for n in range(100_000)]
    store(tmp_path, 1, dict.fromkeys(names, ("float32", (1,), b"1234")), {"m": ("module", {})})
    opened: set[Path] = set()
    real = os.open

    def watching(path: str | os.PathLike[str], *args: object, **options: object) -> int:
        opened.add(Path(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", watching)
    assert len(inspection.inspect(tmp_path, 1).ranks[0].tensors) == len(names)
    files = [path for path in opened if path.is_file()]
    assert files and not [path for path in files if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in files) < 30_000_000


def test_what_is_not_ours_is_left_alone(tmp_path: Path, pool: native.Pool) -> None:
    save(tmp_path, pool, 1)
    (tmp_path / "step-000000000002").mkdir()  # never committed
    (tmp_path / "step-3").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    outside = tmp_path.with_name(tmp_path.name + "-outside")
    save(outside, pool, 7)
    (tmp_path / "step-000000000007").symlink_to(outside / "step-000000000007")
    assert [snapshot.step for snapshot in catalog.snapshots(tmp_path)] == [1]
    with pytest.raises(SnapshotNotFoundError, match="no step 7"):
        catalog.verify(tmp_path, 7)


def test_no_folder_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    assert catalog.snapshots(tmp_path) == []
    with pytest.raises(SnapshotNotFoundError, match="does not exist"):
        catalog.snapshots(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="not a run's folder"):
        catalog.snapshots(tmp_path / "file")
    with pytest.raises(CapabilityError, match="no such kind of store"):
        catalog.snapshots("ftp://host/run")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "newer", "link", "folder"])
def test_a_damaged_manifest_is_listed_with_its_reason(tmp_path: Path, pool: native.Pool, damage: str) -> None:
    save(tmp_path, pool, 1)
    save(tmp_path, pool, 2)
    path = image(tmp_path, 2).with_name("manifest.json")
    data = path.read_bytes()
    if damage == "flip":
        flip(path, len(data) // 2)
    elif damage == "cut":
        path.write_bytes(data[:50])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "newer":
        from zerostall.core.envelope import seal

        path.write_bytes(seal(b'{"version":99}'))
    else:
        path.unlink()
        path.symlink_to(image(tmp_path, 1).with_name("manifest.json")) if damage == "link" else path.mkdir()
    good, bad = catalog.snapshots(tmp_path)
    assert good.clean and not bad.clean and bad.step == 2 and bad.reason
    (verdict,) = catalog.verify(tmp_path, 2)
    assert not verdict.clean and verdict.problems == (bad.reason,)


def test_missing_and_short_images_show_in_the_list(tmp_path: Path, pool: native.Pool) -> None:
    for step in (1, 2, 3):
        save(tmp_path, pool, step)
    image(tmp_path, 1).unlink()
    os.truncate(image(tmp_path, 2), 5000)
    reasons = [snapshot.reason for snapshot in catalog.snapshots(tmp_path)]
    assert "No such file" in reasons[0] and "has 5000 bytes" in reasons[1] and reasons[2] == ""
    assert [verdict.clean for verdict in catalog.verify(tmp_path)] == [False, False, True]


# ------------------------------------------------------------------------------------------------------- verify


def test_every_byte_counts(tmp_path: Path, pool: native.Pool) -> None:
    made = save(tmp_path, pool, 5)
    assert catalog.verify(tmp_path) == [catalog.Verdict(5, len(made.bytes), ())]
    for at in (0, 4095, 4096, len(made.bytes) - 1):
        flip(image(tmp_path, 5), at)
        (verdict,) = catalog.verify(tmp_path, 5)
        assert not verdict.clean and "1 of 1 chunks fail their checksum: chunk 0" in verdict.problems[0]
        flip(image(tmp_path, 5), at)
    assert catalog.verify(tmp_path, 5)[0].clean


def test_bad_chunks_are_named_and_the_others_still_read(tmp_path: Path, pool: native.Pool) -> None:
    made = save(tmp_path, pool, 5, 2 * CHUNK + 999)
    flip(image(tmp_path, 5), CHUNK + 7)
    told: list[tuple[int, int]] = []
    (verdict,) = catalog.verify(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert "1 of 3 chunks fail their checksum: chunk 1" in verdict.problems[0]
    assert verdict.nbytes == len(made.bytes) - CHUNK
    assert told[-1] == (len(made.bytes), len(made.bytes)) and told == sorted(told)


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "link", "swapped"])
def test_records_and_images_are_checked_against_the_manifest(
    tmp_path: Path, pool: native.Pool, name: str, damage: str
) -> None:
    save(tmp_path, pool, 1)
    save(tmp_path, pool, 2)
    path = image(tmp_path, 2).with_name(name)
    other = image(tmp_path, 1).with_name(name)
    path.unlink()
    if damage == "link":
        path.symlink_to(other)
    elif damage == "swapped":
        path.write_bytes(other.read_bytes())
    (verdict,) = catalog.verify(tmp_path, 2)
    assert len(verdict.problems) == 1 and str(path) in verdict.problems[0]


def test_a_missing_layout_is_named(tmp_path: Path, pool: native.Pool) -> None:
    save(tmp_path, pool, 1)
    layout, *spare = sorted((tmp_path / "layouts").iterdir(), key=lambda path: len(path.name))
    assert len(spare) == 1
    layout.unlink()
    assert catalog.verify(tmp_path)[0].clean  # each is there twice
    spare[0].unlink()
    (verdict,) = catalog.verify(tmp_path)
    assert verdict.problems == (f"{layout} is missing",)


def test_a_rank_that_is_not_there_is_a_problem_of_its_own(tmp_path: Path, pool: native.Pool) -> None:
    shape = make_layout(100)
    ranks = [HandMade(shape, 9, rank=rank, world=2) for rank in range(2)]
    disk = DiskTier(tmp_path, pool)
    for rank in ranks:
        disk.put(rank.image)
    disk.commit(manifest_of(*(rank.record for rank in ranks)))
    assert catalog.verify(tmp_path)[0].clean
    image(tmp_path, 9).with_name("rank-00001.safetensors").unlink()
    (verdict,) = catalog.verify(tmp_path)
    assert len(verdict.problems) == 1 and "rank-00001.safetensors is missing" in verdict.problems[0]


# --------------------------------------------------------------------------------------------------------- diff


def test_differences_of_every_kind(tmp_path: Path) -> None:
    same, old, new = bytes(range(40)), bytes(40), bytes(38) + b"\x01\x00"
    lr, other = ("optimizer", {"lr": 0.1, "betas": (0.9, 0.99)}), ("optimizer", {"lr": 0.2, "betas": (0.9, 0.99)})
    before = {"m.same": ("float32", (10,), same), "m.w": ("float32", (2, 5), old), "m.gone": ("uint8", (1,), b"x")}
    after = {"m.same": ("float32", (10,), same), "m.w": ("float32", (2, 5), new), "m.new": ("uint8", (1,), b"x")}
    store(tmp_path, 1, before | {"m.cast": ("float16", (2,), bytes(4))}, {"optimizer": lr})
    store(tmp_path, 2, after | {"m.cast": ("bfloat16", (2,), bytes(4))}, {"optimizer": other, "epoch": ("values", 3)})
    found = catalog.diff(tmp_path, 1, 2)
    assert (found.only_a, found.only_b, found.equal, found.same) == (["m.gone"], ["m.new"], 1, False)
    assert [(row.name, row.a, row.b) for row in found.reshaped] == [("m.cast", "float16 (2)", "bfloat16 (2)")]
    (changed,) = found.changed
    assert (changed.name, changed.elements, changed.changed_elements) == ("m.w", 10, 1)
    assert [(row.name, row.a, row.b) for row in found.values] == [("optimizer.lr", "0.1", "0.2"), ("epoch", "", "3")]
    assert catalog.diff(tmp_path, 1, 1).same


def test_tensors_over_several_chunks_are_compared_whole(tmp_path: Path, pool: native.Pool) -> None:
    size = CHUNK + 5_000_001
    save(tmp_path, pool, 1, size, seed=1)
    made = save(tmp_path, pool, 2, size, seed=1)
    assert catalog.diff(tmp_path, 1, 2).changed == []
    entry = made.image.layout.entries[0]
    data = bytearray(made.bytes[entry.offset :])
    places = [0, 1, CHUNK - 4096, CHUNK, size - 1]
    for at in places:
        data[at] ^= 0x80
    store(tmp_path, 3, {entry.name: ("uint8", (size,), bytes(data))})
    (changed,) = catalog.diff(tmp_path, 1, 3).changed
    assert changed.changed_elements == len(places)


def test_a_damaged_side_is_an_error_not_a_difference(tmp_path: Path, pool: native.Pool) -> None:
    save(tmp_path, pool, 1)
    save(tmp_path, pool, 2)
    flip(image(tmp_path, 2), 9000)
    with pytest.raises(CorruptError, match="chunk 0"):
        catalog.diff(tmp_path, 1, 2)
    with pytest.raises(SnapshotNotFoundError, match="no step 3"):
        catalog.diff(tmp_path, 1, 3)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_changed_elements_are_counted_one_by_one(itemsize: int) -> None:
    noise = random.Random(itemsize)
    for _ in range(30):
        elements = noise.randrange(1, 200)
        a = bytearray(noise.randbytes(elements * itemsize))
        b = bytearray(a)
        chosen = {noise.randrange(elements) for _ in range(noise.randrange(8))}
        for element in chosen:
            b[element * itemsize + noise.randrange(itemsize)] ^= 1 << noise.randrange(8)
        assert changed_elements(a, b, itemsize) == len(chosen)


# ---------------------------------------------------------------------------------------------------------- pin


def test_pins_come_and_go(tmp_path: Path, pool: native.Pool) -> None:
    save(tmp_path, pool, 1)
    for pinned in (True, True, False, False):
        catalog.pin(tmp_path, 1, pinned)
        assert catalog.snapshots(tmp_path)[0].pinned is pinned
    for pinned in (True, False):
        with pytest.raises(SnapshotNotFoundError, match="no step 2"):
            catalog.pin(tmp_path, 2, pinned)


# ----------------------------------------------------------------------------------------- contents and values


def test_contents_tell_aliases_and_sort_as_people_do() -> None:
    shards = [Shard.whole(f"m.layers.{n}.w", "float32", (4, 3)) for n in (10, 2, 1)]
    shards.append(Shard.whole("m.wide[=distinct]", "float32", (1, 3)))
    views = [
        View("m.head", "m.layers.2.w", "float32", (4, 3), (3, 1), 0),
        View("m.row", "m.layers.2.w", "float32", (3,), (1,), 12),
        View("m.wide", "m.wide[=distinct]", "float32", (5, 3), (0, 1), 0),
    ]
    found = {content.name: content for content in contents(layouts.build(shards, views))}
    assert list(found) == ["m.head", "m.layers.1.w", "m.layers.2.w", "m.layers.10.w", "m.row", "m.wide"]
    assert found["m.head"].twin and found["m.head"].alias_of == "m.layers.2.w"
    assert not found["m.row"].twin and found["m.row"].alias_of == "m.layers.2.w"
    assert found["m.wide"].alias_of == "" and found["m.wide"].nbytes == 60


def test_natural_order() -> None:
    names = ["a10", "a9", "a1.b", "a", "b1", "a010", "a" + "9" * 5000]
    assert sorted(names, key=natural) == ["a", "a1.b", "a9", "a10", "a010", "a" + "9" * 5000, "b1"]


def test_runs_are_the_elements_in_order() -> None:
    for shape, strides in [
        ((2, 3), (3, 1)),
        ((3, 2), (1, 3)),
        ((4,), (0,)),
        ((2, 1, 5), (40, 7, 2)),
        ((), ()),
        ((0, 3), (3, 1)),
    ]:
        wanted = [0]
        for size, stride in zip(shape, strides):
            wanted = [start + index * stride for start in wanted for index in range(size)]
        assert [s + i * step for s, count, step in runs(shape, strides) for i in range(count)] == wanted
    assert len(list(runs((8, 4, 2), (8, 2, 1)))) == 1


def test_small_values_as_lines() -> None:
    tree = {
        "parts": {
            "model": ("module", {}),
            "opt": (
                "optimizer",
                {"lr": 1e-3, "w": TensorRef("opt.w"), "t": (1, float("nan")), "k": {1: "a", "b.c": None}},
            ),
        },
        "rng": {"torch": b"12345", "long": list(range(100)), "big": 1 << 100},
    }
    found = {leaf.name: leaf.text for leaf in leaves(values.encode(tree))}
    assert found.pop("rng.long").startswith("list of 100 #")
    assert found.pop("rng.torch").startswith("bytes of 5 bytes #")
    assert found == {
        "model": "{}",
        "opt.lr": "0.001",
        "opt.t[0]": "1",
        "opt.t[1]": "nan",
        "opt.k[1]": "'a'",
        "opt.k.b\\.c": "None",
        "rng.big": str(1 << 100),
    }


def test_long_values_differ_where_they_do() -> None:
    texts = [leaves(values.encode({"v": value}))[0].text for value in ("x" * 5000, "x" * 5001, "x" * 5000)]
    assert texts[0] == texts[2] != texts[1] and all(len(text) < 150 for text in texts)


def test_records_from_elsewhere_are_refused(tmp_path: Path, pool: native.Pool) -> None:
    """A whole, self-consistent record of another run in this step's place."""
    made = save(tmp_path, pool, 1)
    import msgspec

    forged = msgspec.structs.replace(made.record, run="another")
    image(tmp_path, 1).with_name("rank-00000.json").write_bytes(manifest.encode_record(forged))
    (verdict,) = catalog.verify(tmp_path)
    assert "of run another" in verdict.problems[0]


def test_what_print_says_of_a_step() -> None:
    step = Snapshot(3, 2, 4144, 0.25, True, 1e9, clean=True)
    assert str(step) == f"step 3: 4144 bytes of 2 ranks, saved {moment(1e9)}, metric 0.25, pinned"
    gone = Snapshot(3, 0, 0, None, False, 0.0, clean=False, reason="the manifest is cut")
    assert str(gone) == "step 3: 0 bytes, damaged: the manifest is cut"
    assert str(Verdict(3, 10, ())) == "step 3: 10 bytes read, all well"
    assert str(Verdict(3, 10, ("a", "b"))) == "step 3: 10 bytes read, a; b"
