"""One suite over all tiers: what each verb does in each state of a step (tiers/contract.py)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from images import RUN, HandMade, make_layout, manifest_of, record_of
from partner import Partner
from stores.azure import Azurite
from stores.google import Google
from stores.runs import fetched
from stores.seaweed import Seaweed
from stores.server import Server
from zerostall import native
from zerostall.agent import guests
from zerostall.core import layout as layouts
from zerostall.core.manifest import RunFacts
from zerostall.core.retention import Keep, StepFacts
from zerostall.errors import CorruptError, ForeignStepError, FormatError, SnapshotNotFoundError, StepExistsError
from zerostall.flow.persist import prune
from zerostall.flow.present import newest
from zerostall.tiers.contract import Image, Tier
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.host import HostTier, stride_of
from zerostall.tiers.remote import RemoteTier
from zerostall.tiers.store import Store

SIZES = (3_000_000, 20_000_000, 17, 0)


@pytest.fixture(scope="module")
def layout():
    return make_layout(*SIZES)


@pytest.fixture(scope="module")
def pool() -> Iterator[native.Pool]:
    pool = native.Pool("test", 2)
    yield pool
    pool.close()


# Each commits by itself; what a partner holds is clean when its home says so.
COMMITTING = [
    "host",
    "disk",
    "disk without O_DIRECT",
    "remote",
    "remote through obstore",
    "seaweed",
    "azurite",
    "google",
]


@pytest.fixture(params=[*COMMITTING, "replica"])
def tier(
    request: pytest.FixtureRequest, tmp_path: Path, pool: native.Pool, layout, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tier]:
    if request.param == "replica":
        monkeypatch.setattr(guests, "SLOTS", 3)
        partner = Partner(pool)
        yield partner
        partner.close()
    elif request.param == "host":
        segment = native.Segment("tier", stride_of(layout) * 3)
        yield HostTier(layout, segment, 3, pool)
        segment.close()
    elif request.param in ("seaweed", "azurite", "google"):
        server: Seaweed | Azurite | Google = request.getfixturevalue(request.param)
        with ThreadPoolExecutor(4) as hands:
            url = f"{server.scheme}://{server.new_bucket()}/run 1/é"
            tier = RemoteTier(Store(url, server.environment()), hands)
            yield tier
            tier.close()
    elif request.param.startswith("remote"):
        moto: Server = request.getfixturevalue("s3_server")
        environment = moto.environment()
        if request.param != "remote":
            environment["AWS_SERVER_SIDE_ENCRYPTION"] = "AES256"  # uploads are then obstore's
        with ThreadPoolExecutor(4) as hands:
            tier = RemoteTier(Store(f"s3://{moto.new_bucket()}/run 1/é", environment), hands)
            yield tier
            tier.close()
    else:
        yield DiskTier(tmp_path / "run", pool, direct=request.param == "disk")


def test_an_absent_step_is_not_there(tier: Tier, layout) -> None:
    assert tier.steps() == []
    for look in (lambda: tier.manifest(1), lambda: tier.open(1, 0), lambda: fetched(tier, 1, layout)):
        with pytest.raises(SnapshotNotFoundError):
            look()
    tier.evict(1)


by_itself = pytest.mark.parametrize("tier", COMMITTING, indirect=True)


@by_itself
def test_a_step_without_images_cannot_be_committed(tier: Tier, layout) -> None:
    with pytest.raises(FormatError):
        tier.commit(manifest_of(HandMade(layout, 1).record))


def test_a_step_is_there_when_its_manifest_is(tier: Tier, layout) -> None:
    made = HandMade(layout, 7)
    tier.put(made.image)
    assert tier.steps() == []
    with pytest.raises(SnapshotNotFoundError):
        tier.open(7, 0)
    manifest = manifest_of(made.record)
    tier.commit(manifest)
    assert tier.steps() == [7]
    assert tier.manifest(7) == manifest
    if isinstance(tier, DiskTier | RemoteTier):
        assert tier.facts([7, 8]) == {7: StepFacts.of(manifest)}
    stored = tier.open(7, 0)
    assert (stored.layout, stored.record.checksums) == (layout, made.record.checksums)
    assert fetched(tier, 7, layout) == made.bytes


def test_steps_come_in_the_order_of_numbers(tier: Tier, layout) -> None:
    for step in (9, 10, 100):
        made = HandMade(layout, step)
        tier.put(made.image)
        tier.commit(manifest_of(made.record))
    assert tier.steps() == [9, 10, 100]


def test_an_unfinished_step_can_be_put_again(tier: Tier, layout) -> None:
    first, second = HandMade(layout, 3, seed=1), HandMade(layout, 3, seed=2)
    tier.put(first.image)
    tier.put(second.image)
    tier.commit(manifest_of(second.record))
    assert fetched(tier, 3, layout) == second.bytes


@by_itself
def test_a_committed_step_is_replaced_only_when_asked(tier: Tier, layout) -> None:
    old, new = HandMade(layout, 3, seed=1), HandMade(layout, 3, seed=2)
    tier.put(old.image)
    tier.commit(manifest_of(old.record))
    if not isinstance(tier, HostTier):
        tier.put(new.image)
        with pytest.raises(StepExistsError):
            tier.commit(manifest_of(new.record))
        assert fetched(tier, 3, layout) == old.bytes
    else:
        with pytest.raises(StepExistsError):
            tier.commit(manifest_of(old.record))
    tier.put(new.image)
    tier.commit(manifest_of(new.record), replace=True)
    assert tier.steps() == [3]
    assert fetched(tier, 3, layout) == new.bytes


def test_an_evicted_step_is_gone_and_may_come_again(tier: Tier, layout) -> None:
    made = HandMade(layout, 3)
    tier.put(made.image)
    tier.commit(manifest_of(made.record))
    tier.evict(3)
    assert tier.steps() == []
    with pytest.raises(SnapshotNotFoundError):
        tier.open(3, 0)
    tier.put(made.image)
    tier.commit(manifest_of(made.record))
    assert fetched(tier, 3, layout) == made.bytes


@pytest.mark.parametrize("tier", ["disk", "remote"], indirect=True)
def test_a_step_of_another_run_is_refused_and_never_counted(tier: Tier) -> None:
    assert isinstance(tier, DiskTier | RemoteTier)
    small = make_layout(100)
    made = HandMade(small, 9)
    record = record_of(small, made.bytes, 9, run="theirs", created=99.0)
    tier.put(Image(small, record, made.memory.address))
    tier.commit(manifest_of(record))
    for step in (1, 2, 3):
        mine = HandMade(small, step)
        tier.put(mine.image)
        tier.commit(manifest_of(mine.record))
    assert tier.manifest(9).run == "theirs", "nothing says yet whose steps these are"
    named = RunFacts(run="unasked", name="", fingerprint=layouts.fingerprint([small]))
    assert tier.found_run(named).run == RUN, "run.json was lost, and most steps are of that run"
    for read in (tier.manifest, lambda step: tier.open(step, 0)):
        with pytest.raises(ForeignStepError, match=f"run, theirs.* run {RUN}"):
            read(9)
    assert tier.created(9) == 0.0
    assert prune(tier, Keep(last=2), frozenset()) == (1,)
    assert tier.steps() == [2, 3, 9]
    tier.evict(3)
    assert prune(tier, Keep(last=1), frozenset()) == ()
    assert tier.strangers([2, 9]) == {9}
    assert newest(tier) == 2


def test_a_flipped_bit_is_found(tier: Tier, layout, tmp_path: Path) -> None:
    made = HandMade(layout, 3)
    tier.put(made.image)
    tier.commit(manifest_of(made.record))
    where = layout.nbytes - 5
    if isinstance(tier, HostTier | Partner):
        memory = tier.memory_of(3) if isinstance(tier, Partner) else tier
        slot = memory.slots.at_step(3)
        assert slot is not None
        memory.segment.view(slot.index * memory.stride + where, 1)[0] ^= 0x40
    elif isinstance(tier, RemoteTier):
        name = tier.image_name(3, 0)
        flipped = bytearray(made.bytes)
        flipped[where] ^= 0x40
        tier.store.put(name, bytes(flipped))
    else:
        path = tmp_path / "run" / "step-000000000003" / "rank-00000.safetensors"
        with path.open("r+b") as file:
            file.seek(where)
            byte = file.read(1)[0]
            file.seek(where)
            file.write(bytes([byte ^ 0x40]))
    if isinstance(tier, Partner):  # which looks for itself when it is told, and gives it to nobody any more
        with pytest.raises(SnapshotNotFoundError, match="damaged"):
            fetched(tier, 3, layout)
        assert set(tier.doubts) == {3}
        return
    with pytest.raises(CorruptError, match="chunk"):
        fetched(tier, 3, layout)
