"""A cluster of etcd members on loopback, of which some can be killed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from free_ports import free_ports
from hand import wait_until


def missing() -> str | None:
    return None if shutil.which("etcd") else "the command etcd is missing (etcd-server)"


class Members:
    def __init__(self, folder: Path, count: int = 3) -> None:
        ports = free_ports(2 * count)
        self.clients = ports[:count]
        peers = [f"http://127.0.0.1:{port}" for port in ports[count:]]
        everybody = ",".join(f"m{k}={peer}" for k, peer in enumerate(peers))
        self.processes: list[subprocess.Popen[bytes]] = []
        for k in range(count):
            url = f"http://127.0.0.1:{self.clients[k]}"
            command = ["etcd", "--name", f"m{k}", "--data-dir", str(folder / f"etcd-{k}")]
            command += ["--listen-client-urls", url, "--advertise-client-urls", url]
            command += ["--listen-peer-urls", peers[k], "--initial-advertise-peer-urls", peers[k]]
            command += ["--initial-cluster", everybody, "--initial-cluster-token", folder.name]
            # A busy machine is no reason to vote.
            command += ["--heartbeat-interval", "250", "--election-timeout", "5000"]
            with (folder / f"etcd-{k}.log").open("w") as log:
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ)))

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self.clients) + "/test"

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def until_served(members: Members) -> None:
    """Return when a majority has a leader."""
    from zerostall.errors import StorageError
    from zerostall.manager.etcd import Etcd, Place

    def answers() -> bool:
        etcd = Etcd(Place.parse(members.url))
        try:
            etcd.revoke(etcd.grant(5))
        except StorageError:
            return False
        finally:
            etcd.close()
        return True

    wait_until(answers, 60.0)
