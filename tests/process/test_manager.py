"""`zerostall manager` with real agents: who is there, what is clean, and who is refused."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster import PATIENT, QUICK, SECONDS, Agents, Manager, member_environment, refused, use
from forked import cli
from hand import HandTrainer, agent_pid, close_all, kill_agent, wait_until
from zerostall.errors import ManagerError
from zerostall.manager.settings import ManagerSettings
from zerostall.wire import cluster as w
from zerostall.wire import rendezvous, token
from zerostall.wire.manager_link import ManagerLink
from zerostall.wire.state import State


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_an_agent_reports_what_it_has_and_a_silent_one_is_lost_until_it_speaks(
    manager: Manager, agents: Agents, tmp_path: Path
) -> None:
    folder = agents("n1")
    trainer = HandTrainer(folder, tmp_path / "run")
    trainer.lease()
    trainer.seal(7, promise=True)
    manager.until_clean(7)

    def all_of_it() -> bool:  # on a busy machine the node may seem lost for a while
        run = manager.run()
        if run is None or not run.snapshots:
            return False
        shown = (run.training, run.world, run.where) == (1, 1, str(tmp_path / "run"))
        return shown and "disk" in run.snapshots[0].tiers

    wait_until(all_of_it, SECONDS)
    epoch = manager.node("n1").epoch

    pid = agent_pid(folder)
    os.kill(pid, signal.SIGSTOP)
    try:
        manager.until_health("n1", "lost")
        wait_until(lambda: (run := manager.run()) is None or run.target is None, SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: (node := manager.node("n1")).health == "alive" and node.epoch > epoch, SECONDS)
    manager.until_clean(7)
    events = [event.text for event in manager.state().events if event.subject == "n1"]
    assert any("suspected → lost: silent for" in text for text in events)
    assert any("came back after it was lost" in text for text in events)


def test_a_new_agent_takes_over_the_node_and_a_goodbye_is_heard(
    manager: Manager, agents: Agents, tmp_path: Path
) -> None:
    folder = agents("n1")
    trainer = HandTrainer(folder, tmp_path / "run")
    manager.until_health("n1", "alive")
    kill_agent(folder)
    trainer.leave()
    again = HandTrainer(folder, tmp_path / "run")
    wait_until(lambda: manager.node("n1").epoch == 2)
    again.leave()
    os.kill(agent_pid(folder), signal.SIGTERM)
    manager.until_health("n1", "left")


def test_without_a_manager_training_goes_on_and_a_new_one_hears_it_all_again(
    manager: Manager, agents: Agents, tmp_path: Path
) -> None:
    folder = agents("n1")
    trainer = HandTrainer(folder, tmp_path / "run")
    trainer.lease()
    trainer.seal(1)
    manager.until_clean(1)
    manager.kill()
    trainer.seal(2, promise=True)
    assert trainer.copies() >= {(2, "host", True)}
    manager.start()
    manager.until_clean(2)
    assert manager.node("n1").epoch == 1  # the same agent in the same epoch
    assert any(event.text.startswith("step 1 is clean") for event in manager.state().events)  # what was is remembered


def test_a_manager_that_never_is_there_costs_nothing(
    agent_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "token"
    token.make(secret)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ZEROSTALL_MANAGER", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("ZEROSTALL_TOKEN_FILE", str(secret))
        folder = Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])
        trainer = HandTrainer(folder, tmp_path / "run")
        trainer.lease()
        made = trainer.seal(3)
        assert trainer.fetch(3, "host") == made.bytes
        close_all()


def test_who_is_refused(manager: Manager) -> None:
    link = manager.link()
    join = w.Join(node="n1", instance="a")
    assert link.post("join", join, w.Joined).epoch == 1
    first = w.Report(node="n1", epoch=1, sequence=1, version=0, held=())
    assert link.post("report", first, w.Answer).sequence == 1
    link.post("report", w.Report(node="n1", epoch=1, sequence=2, version=0), w.Answer)
    assert refused(link, "report", first) == "late"  # said again by somebody who listened
    assert refused(link, "report", w.Report(node="n2", epoch=1, sequence=1, version=0)) == "unknown"
    assert link.post("join", w.Join(node="n1", instance="b"), w.Joined).epoch == 2
    assert refused(link, "report", w.Report(node="n1", epoch=1, sequence=3, version=0)) == "fenced"
    assert refused(link, "join", w.Join(node="n1", instance="a", last_epoch=1, fenced=True)) == "taken"
    for name in ("../n1", "", "n" * 200, "a b", "<script>"):
        assert refused(link, "join", w.Join(node=name, instance="a")) == "malformed"
    assert refused(link, "join", w.Join(node="n3", instance="c", labels="rack=../x")) == "malformed"
    link.close()

    stranger = ManagerLink(manager.url, "not the token at all", timeout=30.0)
    assert refused(stranger, "join", join) == "token"
    stranger.close()
    assert token.read(manager.token_file) not in manager.log()
    assert "requests without the token" in manager.log() and "not the token at all" not in manager.log()


def ask(manager: Manager, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", manager.port, timeout=30)
    connection.request(method, path, body, {"Authorization": f"Bearer {token.read(manager.token_file)}", **headers})
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


def test_what_is_refused_by_its_form(manager: Manager) -> None:
    assert ask(manager, "GET", "/v1/state", Authorization="")[0] == 401
    assert ask(manager, "GET", "/metrics", Authorization="Bearer")[0] == 401
    assert ask(manager, "GET", "/healthz", Authorization="") == (200, b"ok\n")
    assert ask(manager, "GET", "/v1/../../etc/passwd")[0] == 404
    assert ask(manager, "GET", "/v1/events?after=x")[0] == 400
    status, body = ask(manager, "POST", "/v1/report", b"{" * 1000)
    assert status == 400 and json.loads(body)["kind"] == "malformed"
    status, body = ask(manager, "POST", "/v1/report", b" " * (w.MOST_BYTES + 1))
    assert status == 413 and json.loads(body)["kind"] == "oversized"
    assert ask(manager, "GET", "/v1/state")[0] == 200  # and it goes on


def test_a_token_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    from zerostall.errors import CapabilityError

    secret = tmp_path / "token"
    token.make(secret)
    assert secret.stat().st_mode & 0o777 == 0o600 and len(token.read(secret)) > 32
    secret.chmod(0o640)
    with pytest.raises(CapabilityError, match="others can read"):
        token.read(secret)
    secret.chmod(0o600)
    secret.write_text("short")
    with pytest.raises(CapabilityError, match="holds no token"):
        token.read(secret)


def test_one_manager_a_state_folder(manager: Manager, agent_environment: dict[str, str]) -> None:
    words = ("--port", 0, "--state", manager.folder / "state", "--token-file", manager.token_file)
    done = cli(agent_environment, "manager", *words)
    assert done.returncode == 1 and "another manager runs" in done.stderr and "Traceback" not in done.stderr


_STRANGER = """
import encodings.idna, os, socket, sys
folder, agent, token, pid, peer, manager = sys.argv[1:]
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)

def refused(what, act):
    try:
        act()
    except PermissionError:
        return
    raise SystemExit(f"{what} is open to another user")

refused("the agent's socket", lambda: socket.socket(socket.AF_UNIX).connect(agent))
refused("the runtime folder", lambda: os.listdir(folder))
refused("the token", lambda: open(token))
refused("the agent's memory", lambda: open(f"/proc/{pid}/mem", "rb"))
refused("the agent's segments", lambda: os.listdir(f"/proc/{pid}/fd"))
refused("the agent's environment", lambda: open(f"/proc/{pid}/environ").read())
host, port = peer.rsplit(":", 1)
with socket.create_connection((host, int(port)), 30) as sock:
    sock.settimeout(30)
    assert len(sock.recv(32, socket.MSG_WAITALL)) == 32
    sock.sendall((40).to_bytes(4, "big") + bytes(40))
    assert sock.recv(1) == b"", "the peer port answers anybody"
with socket.create_connection(("127.0.0.1", int(manager)), 30) as sock:
    sock.sendall(b"GET /v1/state HTTP/1.1\\r\\nHost: m\\r\\nConnection: close\\r\\n\\r\\n")
    answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 401") and b"n1" not in answer, answer
print("nothing")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_of_the_node_gets_nothing(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    folder = agents("n1")
    trainer = HandTrainer(folder, tmp_path / "run")
    trainer.lease()
    trainer.seal(1)
    manager.until_clean(1)
    link = manager.link()
    link.post("join", w.Join(node="n2", instance="asks"), w.Joined)
    peer = link.post("whereis", w.WhereIs(node="n2", run=trainer.welcome.run_id, rank=0), w.Located).copies[0].peer
    link.close()
    # Whoever it is can walk to the folders, so that it is their own rights that keep strangers out.
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    agent = [str(folder), str(rendezvous.socket_path(folder))]
    words = [*agent, str(manager.token_file), str(agent_pid(folder)), peer.address, str(manager.port)]
    done = subprocess.run([sys.executable, "-c", _STRANGER, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "nothing\n", done.stderr


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the command openssl is missing: no certificate can be made"
)
def test_with_a_certificate_everything_goes_by_tls(
    agent_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, key, certificate = tmp_path / "manager", tmp_path / "manager/key.pem", tmp_path / "manager/certificate.pem"
    folder.mkdir()
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    manager = Manager(folder, agent_environment, *PATIENT, "--certificate", str(certificate), "--key", str(key))
    try:
        assert manager.url.startswith("https://")
        monkeypatch.setenv("ZEROSTALL_MANAGER_CA", str(certificate))
        runtime = use(member_environment(agent_environment, manager, "n1", tmp_path / "n1"), monkeypatch)
        HandTrainer(runtime, tmp_path / "run")
        manager.until_health("n1", "alive")
        trusting_others = ManagerLink(manager.url, token.read(manager.token_file), timeout=30.0)
        with pytest.raises(ManagerError):
            trusting_others.get("state", State)
        trusting_others.close()
        close_all()
        kill_agent(runtime)
    finally:
        manager.close()


def listening(pid: int) -> set[str]:
    """The addresses at which a process takes connections over a network."""
    inet = psutil.Process(pid).net_connections("inet")
    return {one.laddr.ip for one in inet if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM}


def test_nobody_listens_to_other_machines_unless_told_to(
    manager: Manager, agents: Agents, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With default settings the manager is reached from its own machine alone, and an agent by no network at all."""
    assert manager.process is not None
    assert listening(manager.process.pid) == {"127.0.0.1"}
    assert ManagerSettings(state=tmp_path, token_file=tmp_path / "token").loopback
    folder = agents("n1")
    monkeypatch.delenv("ZEROSTALL_PEER")
    HandTrainer(folder, tmp_path / "run").lease()
    manager.until_health("n1", "alive")
    assert listening(agent_pid(folder)) == set()
    folder = agents("n2")  # given the address 127.0.0.1
    HandTrainer(folder, tmp_path / "other").lease()
    manager.until_health("n2", "alive")
    assert listening(agent_pid(folder)) == {"127.0.0.1"}
