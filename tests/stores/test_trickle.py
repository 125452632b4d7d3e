"""Steps on their way to an object store: from disk, from memory alone, past an agent's death, back into a trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import zerostall
from conftest import stop_agent
from forked import cli
from hand import HandTrainer, close_all, kill_agent, wait_until
from images import make_layout
from stores.proxy import Proxy
from stores.server import Server
from zerostall.core.candidates import Past
from zerostall.errors import RunMismatchError, StorageError
from zerostall.tiers.remote import RemoteTier
from zerostall.tiers.store import Store
from zerostall.wire import messages as m

LARGE = make_layout(35_000_000)


@pytest.fixture(autouse=True)
def close_channels() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def folder(own_agent: Path) -> Path:
    return own_agent


@pytest.fixture
def afar(s3_server: Server, bucket: str) -> Iterator[RemoteTier]:
    """What is in the store, seen from elsewhere."""
    with ThreadPoolExecutor(2) as hands:
        tier = RemoteTier(Store(f"s3://{bucket}/run", s3_server.environment()), hands)
        yield tier
        tier.close()


def rules(
    server: Server,
    bucket: str,
    url: str | None = None,
    *,
    every: float = 0.0,
    keep: int = 3,
    within: float | None = None,
) -> m.RemoteRules:
    return m.RemoteRules(
        url=f"s3://{bucket}/run",
        every=every,
        keep_last=keep,
        keep_every=None,
        keep_best=None,
        best_mode="min",
        rate=None,
        environment=server.environment(url),
        keep_within=within,
    )


def where_of(tmp_path: Path, kind: str, bucket: str) -> Path:
    return tmp_path / "run" if kind == "disk" else Path(f"s3://{bucket}/run")


@pytest.fixture(params=["disk", "memory alone"])
def trainer(request, folder: Path, tmp_path: Path, s3_server: Server, bucket: str):
    """Makes trainers of one run, with a disk or without."""
    where = tmp_path / "run" if request.param == "disk" else f"s3://{bucket}/run"

    def make(folder: Path = folder, url: str | None = None, **policy) -> HandTrainer:
        made = HandTrainer(folder, where, remote=rules(s3_server, bucket, url, **policy))
        made.lease()
        return made

    return make


def test_a_step_gets_to_the_store_and_comes_back(trainer, afar: RemoteTier) -> None:
    one = trainer()
    made = one.seal(5)
    one.hear(m.Reached, step=5, tier="remote")
    assert afar.steps() == [5]
    assert (5, "remote", True) in one.copies()
    assert one.fetch(5, "remote") == made.bytes


def test_the_newest_goes_when_its_time_has_come_and_one_that_is_waited_for_at_once(trainer, afar: RemoteTier) -> None:
    one = trainer(every=3600.0)
    for step in (1, 2, 3):
        made = one.seal(step)
        one.hear(m.Reached, step=step, tier="host")
    one.channel.send(m.Promise(step=3, created=made.created, tier="remote"))
    one.hear(m.Reached, step=3, tier="remote")
    assert afar.steps()[-1] == 3
    one.seal(4)
    one.hear(m.Reached, step=4, tier="host")
    one.leave()  # nobody trains any more: the newest goes now
    wait_until(lambda: afar.steps()[-1] == 4)


def test_retention_is_the_remote_tiers_own(trainer, afar: RemoteTier) -> None:
    one = trainer(keep=2)
    for step in (1, 2, 3, 4):
        made = one.seal(step, pin=step == 1)
        one.channel.send(m.Promise(step=step, created=made.created, tier="remote"))
        one.hear(m.Reached, step=step, tier="remote")
    wait_until(lambda: afar.steps() == [1, 3, 4])


def test_steps_stay_in_the_store_for_as_long_as_they_are_wanted(trainer, afar: RemoteTier) -> None:
    one = trainer(keep=1, within=3600.0)
    for step in (1, 2, 3):  # each is carried when what the one before it has left is tidied
        one.seal(step)
        one.hear(m.Reached, step=step, tier="remote")
    assert afar.steps() == [1, 2, 3]


def test_what_turns_out_dirty_goes_from_the_store_too(trainer, afar: RemoteTier) -> None:
    one = trainer()
    one.seal(4)
    one.hear(m.Reached, step=4, tier="remote")
    torn = one.seal(5)
    one.hear(m.Reached, step=5, tier="remote")
    one.channel.send(m.Revoked(step=5, created=torn.created, reason="torn"))
    wait_until(lambda: afar.steps() == [4])
    good = one.seal(5, seed=77)
    one.hear(m.Reached, step=5, tier="remote", created=good.created)
    assert one.fetch(5, "remote") == good.bytes


def test_another_node_goes_on_from_the_store(
    trainer, folder: Path, tmp_path: Path, s3_server: Server, bucket: str
) -> None:
    """The cluster is lost, and with it memory and disk: an agent and a folder that know nothing."""
    one = trainer()
    made = one.seal(5)
    one.hear(m.Reached, step=5, tier="remote")
    elsewhere = tmp_path / "another agent"
    try:
        two = HandTrainer(elsewhere, tmp_path / "another folder", remote=rules(s3_server, bucket))
        assert (two.welcome.steps, two.welcome.run_id) == ((5,), one.welcome.run_id)
        assert two.copies() == {(5, "remote", True)}
        assert two.fetch(5, "remote") == made.bytes
        two.lease()
        two.seal(6)
        two.hear(m.Reached, step=6, tier="remote")
    finally:
        stop_agent(elsewhere)


def test_an_agent_that_dies_in_the_middle_goes_on_where_it_was(
    folder: Path, tmp_path: Path, s3_server: Server, bucket: str, proxy: Proxy, afar: RemoteTier
) -> None:
    hold = proxy.rule("hold", lambda r: r.is_part and "partNumber=3" in r.target, times=100)
    one = HandTrainer(folder, tmp_path / "run", remote=rules(s3_server, bucket, proxy.url))
    one.lease(LARGE)
    made = one.seal(5, LARGE)
    one.hear(m.Reached, step=5, tier="disk")
    assert hold.reached.wait(60)
    wait_until(lambda: len(s3_server.unfinished(bucket)) == 1)
    kill_agent(folder)
    hold.times = 0
    hold.released.set()
    assert afar.steps() == []
    two = HandTrainer(folder, tmp_path / "run", remote=rules(s3_server, bucket, proxy.url))
    two.leave()
    wait_until(lambda: afar.steps() == [5])
    assert s3_server.unfinished(bucket) == []
    three = HandTrainer(folder, tmp_path / "run", remote=rules(s3_server, bucket, proxy.url))
    assert three.fetch(5, "remote") == made.bytes


def test_a_store_that_fails_costs_nothing_near_and_is_tried_again(trainer, proxy: Proxy, afar: RemoteTier) -> None:
    refused = proxy.rule("403 AccessDenied", lambda r: r.method == "PUT", times=1000)
    one = trainer(url=proxy.url)
    made = one.seal(5)
    failed = one.hear(m.Failed, tier="remote")
    assert "AccessDenied" in failed.message and failed.kind == "StorageError"
    assert one.fetch(5, "host") == made.bytes
    refused.times = 0
    one.hear(m.Reached, step=5, tier="remote")
    assert afar.steps() == [5]


def test_without_its_store_a_run_goes_on_only_if_it_has_something_here(
    folder: Path, tmp_path: Path, s3_server: Server, bucket: str, proxy: Proxy, agent_environment: dict[str, str]
) -> None:
    proxy.rule("403 AccessDenied", lambda r: True, times=1000)
    nothing = rules(s3_server, bucket, proxy.url)
    with pytest.raises(StorageError, match="AccessDenied"):
        HandTrainer(folder, tmp_path / "run", remote=nothing)
    one = HandTrainer(folder, tmp_path / "run")
    one.lease()
    one.seal(5)
    one.hear(m.Reached, step=5, tier="disk")
    one.leave()
    two = HandTrainer(folder, tmp_path / "run", remote=nothing)
    assert two.welcome.steps == (5,)
    assert two.copies() >= {(5, "disk", True)}
    assert "goes on without its store" in two.welcome.trouble and "AccessDenied" in two.welcome.trouble
    told = json.loads(cli(agent_environment, "status", "--json").stdout)
    (afar,) = (tier for tier in told["ranks"][0]["tiers"] if tier["tier"] == "remote")
    assert "AccessDenied" in afar["last_error"]


def test_a_url_of_another_run_is_refused(folder: Path, tmp_path: Path, s3_server: Server, bucket: str) -> None:
    one = HandTrainer(folder, tmp_path / "one", remote=rules(s3_server, bucket))
    one.lease()
    one.seal(5)
    one.hear(m.Reached, step=5, tier="remote")
    other = HandTrainer(folder, tmp_path / "other")
    other.lease()
    other.seal(7)
    other.hear(m.Reached, step=7, tier="disk")
    other.leave()
    with pytest.raises(RunMismatchError):
        HandTrainer(folder, tmp_path / "other", remote=rules(s3_server, bucket))


def test_a_past_that_was_left_does_not_come_back_from_the_store(trainer, afar: RemoteTier) -> None:
    one = trainer()
    for step in (5, 9):
        made = one.seal(step, seed=step)
        one.channel.send(m.Promise(step=step, created=made.created, tier="remote"))
        one.hear(m.Reached, step=step, tier="remote")
    again = one.seal(6, seed=20, aside=(Past(9, 10.0),))  # training went back to 5 and on
    one.channel.send(m.Promise(step=6, created=again.created, tier="remote"))
    one.hear(m.Reached, step=6, tier="remote")
    assert (afar.steps(), afar.rewound()) == ([5, 6], [9])


def test_the_status_says_what_would_be_lost(
    folder: Path, tmp_path: Path, s3_server: Server, bucket: str, agent_environment: dict[str, str]
) -> None:
    one = HandTrainer(folder, tmp_path / "run", remote=rules(s3_server, bucket))
    one.lease()
    one.seal(5)
    one.hear(m.Reached, step=5, tier="remote")
    for words in (("status",), ("agent", "status")):
        found = json.loads(cli(agent_environment, *words, "--json").stdout)
        assert [(loss["tier"], loss["step"]) for loss in found["losses"][str(tmp_path / "run")]] == [
            ("host", 5),
            ("disk", 5),
            ("remote", 5),
            ("remote", 5),
        ]
        assert {tier["tier"]: tier["newest"] for tier in found["ranks"][0]["tiers"]} == dict.fromkeys(
            ("host", "disk", "remote"), 5
        )
    text = cli(agent_environment, "agent", "status").stdout
    assert "the whole cluster: the last" in text and "secret-of-a-test" not in text
    one.leave()
    text = cli(agent_environment, "agent", "status").stdout
    assert "nobody is training" in text and "the whole cluster: nothing; step 5 is in the tier remote" in text


def test_no_credentials_in_the_agents_log(trainer, folder: Path, s3_server: Server, proxy: Proxy) -> None:
    proxy.rule("403 AccessDenied", lambda r: r.method == "PUT", times=2)
    one = trainer(url=proxy.url)
    one.seal(5)
    one.hear(m.Reached, step=5, tier="remote")
    written = "".join(path.read_text() for path in folder.rglob("*.log"))
    assert "AccessDenied" in written
    assert "secret-of-a-test" not in written and "key-of-a-test" not in written


# --------------------------------------------------------------------------------------------------- with torch


@pytest.fixture
def environment(folder: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("s3_server", ["moto", "google", "azurite"], indirect=True)
def test_a_checkpointer_saves_to_a_url_and_restores_from_it(
    environment: None, s3_server: Server, tmp_path: Path, bucket: str, folder: Path, alone: bool
) -> None:
    url = f"{s3_server.scheme}://{bucket}/runs/gpt"
    model = torch.nn.Linear(300, 40)
    places = {"where": url} if alone else {"where": tmp_path / "run", "remote": zerostall.Remote(url, every=0)}
    with zerostall.Checkpointer(**places, model=model) as ckpt:
        assert ckpt.restore() == 0
        saving = ckpt.save(1)
        saving.wait("remote", timeout=60)
        assert {"host", "remote"} <= saving.tiers
        if alone:
            with pytest.raises(ValueError, match="no tier 'disk'"):
                saving.wait()
        ckpt.save(2)
    assert [one.step for one in zerostall.snapshots(url)] == [1, 2]  # closing carried the last one there
    stop_agent(folder)  # and what was in memory is gone
    fresh = torch.nn.Linear(300, 40)
    places = {"where": url} if alone else {"where": tmp_path / "another", "remote": url}
    with zerostall.Checkpointer(**places, model=fresh) as ckpt:
        assert ckpt.restore() == 2
        assert ckpt.stats.restored_from == "remote"
        assert torch.equal(fresh.weight, model.weight)
