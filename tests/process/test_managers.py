"""Several managers with one etcd: one leads, any may die, and so may a minority of etcd's members."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import etcd
from cluster import PATIENT, SECONDS, Manager, member_environment, use
from conftest import stop_agent
from hand import HandTrainer, close_all, wait_until
from zerostall.errors import ManagerError, StorageError
from zerostall.manager.election import LEASE_SECONDS, Leadership, campaign, leader_key
from zerostall.manager.etcd import Delete, Etcd, Place, Put
from zerostall.manager.etcd_store import EtcdStore
from zerostall.manager.store import Batch, NodeRow
from zerostall.wire import token
from zerostall.wire.manager_link import ManagerLink
from zerostall.wire.state import State

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(etcd.missing() is not None, reason=str(etcd.missing())),
]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[etcd.Members]:
    started = etcd.Members(tmp_path)
    etcd.until_served(started)
    yield started
    started.close()


@pytest.fixture
def managers(members: etcd.Members, tmp_path: Path, agent_environment: dict[str, str]) -> Iterator[list[Manager]]:
    """Two; the first one leads."""
    started: list[Manager] = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        if started:
            shutil.copy(started[0].token_file, folder / "token")
        started.append(Manager(folder, agent_environment, *PATIENT, "--store", members.url))
        if name == "a":
            wait_until(lambda: leads(started[0]), SECONDS)
    yield started
    for manager in started:
        manager.close()


def link(*managers: Manager) -> ManagerLink:
    secret = token.read(managers[0].token_file)
    return ManagerLink(",".join(manager.url for manager in managers), secret, timeout=10.0)


def state(*managers: Manager) -> State:
    found = link(*managers)
    try:
        return found.get("state", State)
    finally:
        found.close()


def leads(manager: Manager) -> bool:
    try:
        state(manager)
    except ManagerError:
        return False
    return True


def epoch_of(node: str, *managers: Manager) -> int:
    """0 while nobody serves, or the node is not heard."""
    try:
        return next((n.epoch for n in state(*managers).nodes if n.name == node and n.health == "alive"), 0)
    except ManagerError:
        return 0


def test_the_next_manager_goes_on_where_the_last_one_was(
    members: etcd.Members,
    managers: list[Manager],
    tmp_path: Path,
    agent_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = managers
    with pytest.raises(ManagerError, match="another manager leads") as refused:
        state(second)
    assert refused.value.kind == "standby"

    environment = member_environment(agent_environment, first, "n1", tmp_path / "n1")
    environment["ZEROSTALL_MANAGER"] = f"{second.url},{first.url}"
    folder = use(environment, monkeypatch)
    try:
        trainer = HandTrainer(folder, tmp_path / "run")
        trainer.lease()
        trainer.seal(7, promise=True)
        clean = clean_at(7)
        wait_until(lambda: clean(first, second), SECONDS)
        epoch = epoch_of("n1", first, second)
        assert epoch > 0

        # A member of etcd is gone, then the manager that leads: everything goes on, in the same epoch.
        members.kill(0)
        first.kill()
        wait_until(lambda: leads(second), SECONDS)
        wait_until(lambda: epoch_of("n1", first, second) == epoch, SECONDS)
        wait_until(lambda: clean(second), SECONDS)
        assert any("in epoch" in event.text for event in state(second).events)  # what the first one has seen

        # One that stood still while another took over serves no longer.
        first.start()
        assert second.process is not None
        os.kill(second.process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: leads(first), 2 * SECONDS)  # once the other's lease has run out, and etcd is heard
        finally:
            os.kill(second.process.pid, signal.SIGCONT)
        wait_until(lambda: stands_by(second), SECONDS)
        trainer.seal(8)
        wait_until(lambda: clean_at(8)(first, second), SECONDS)
        trainer.leave()
    finally:
        close_all()
        stop_agent(folder)


def clean_at(step: int) -> Callable[..., bool]:
    def clean(*managers: Manager) -> bool:
        try:
            return any(run.target == step for run in state(*managers).runs)
        except ManagerError:
            return False

    return clean


def stands_by(manager: Manager) -> bool:
    try:
        state(manager)
    except ManagerError as error:
        return error.kind == "standby"
    return False


def test_no_majority_no_leader(members: etcd.Members, managers: list[Manager]) -> None:
    """Nobody serves who cannot store."""
    members.kill(0)
    members.kill(1)
    wait_until(lambda: not any(leads(manager) for manager in managers), SECONDS)
    # They are still there, and say so.
    wait_until(lambda: all(stands_by(manager) for manager in managers), SECONDS)


def test_who_leads_no_longer_stores_nothing(members: etcd.Members) -> None:
    place = Place.parse(members.url)
    lost: list[int] = []
    first = elected(place, lost)
    store = EtcdStore(place, None, first)
    store.save(Batch(nodes={"n/1": NodeRow("n/1", "i", 3, True, ("h",))}))
    assert store.load().nodes == (NodeRow("n/1", "i", 3, True, ("h",)),)

    other = Etcd(place)
    other.commit([Delete(leader_key(place))], key=first.key, created=first.revision)
    other.close()
    second = elected(place, lost)
    with pytest.raises(StorageError, match="another manager leads"):
        store.save(Batch(nodes={"n/1": NodeRow("n/1", "i", 4, True)}))
    again = EtcdStore(place, None, second)
    assert again.load().nodes == (NodeRow("n/1", "i", 3, True, ("h",)),)
    again.save(Batch(forgotten={"n/1"}))
    assert again.load().nodes == ()
    for each in (store, again):
        each.close()
    for each in (first, second):
        each.resign()


def elected(place: Place, lost: list[int]) -> Leadership:
    leadership = campaign(place, None, "me", lambda: lost.append(1), threading.Event())
    assert leadership is not None
    assert leadership.holds()
    return leadership


def test_a_lease_that_ran_out_is_noticed(members: etcd.Members) -> None:
    place = Place.parse(members.url)
    lost: list[int] = []
    leadership = elected(place, lost)
    etcd_itself = Etcd(place)
    etcd_itself.revoke(leadership._lease)
    wait_until(lambda: bool(lost), SECONDS)
    assert not leadership.holds()
    # More keys than one page or one transaction takes.
    again = elected(place, lost)
    puts = [Put(place.key("many", f"{k:05}"), str(k).encode()) for k in range(2500)]
    for first in range(0, len(puts), 100):
        assert etcd_itself.commit(list(puts[first : first + 100]), key=again.key, created=again.revision).succeeded
    found = etcd_itself.read(place.key("many", ""))
    assert [int(value) for _, value in found] == list(range(2500))
    etcd_itself.close()
    leadership.resign()
    again.resign()


@pytest.mark.parametrize("url", ["http://h:1/x", "etcd://", "etcd://h:x/", "etcd://h:70000"])
def test_what_is_no_place_is_told(url: str) -> None:
    with pytest.raises(ValueError):
        Place.parse(url)
    assert Place.parse("etcds://[::1]:5,b/p/q/").endpoints == (("::1", 5), ("b", 2379))
    assert LEASE_SECONDS >= 3
