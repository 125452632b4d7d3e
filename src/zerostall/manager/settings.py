"""What a manager is started with, checked once."""

from __future__ import annotations

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core.cluster import Patience
from zerostall.core.fabric import Fabric
from zerostall.errors import CapabilityError, FormatError

if TYPE_CHECKING:
    from zerostall.manager.etcd import Place

PORT = 7077


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """Attributes:
    state: folder of its SQLite file, where no store is given.
    store: etcd, for several managers of which one leads; None for one manager.
    store_authorities: certificates to check etcd's by; None for the system's.
    token_file: the cluster's secret; made where there is none.
    host, port: where it listens; port 0 takes a free one.
    patience: how long nodes may be silent.
    copies: replicas of each image.
    certificate, key: for TLS; None for plain HTTP.
    fabric: where nodes stand, from a topology file; None to go by their labels.
    """

    state: Path
    token_file: Path
    host: str = "127.0.0.1"
    port: int = PORT
    patience: Patience = field(default_factory=Patience)
    copies: int = 1
    certificate: Path | None = None
    key: Path | None = None
    store: Place | None = None
    store_authorities: Path | None = None
    fabric: Fabric | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port} is no port")
        if not 0 <= self.copies <= 4:
            raise ValueError(f"copies={self.copies}: between 0 and 4 replicas of an image")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS needs both a certificate and its key")

    def tls(self) -> ssl.SSLContext | None:
        """The server's side of TLS; None for plain HTTP.

        Raises:
            CapabilityError: the certificate or the key cannot be used.
        """
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise CapabilityError(f"{self.certificate} and {self.key} cannot be used: {error}") from error
        return context

    @property
    def loopback(self) -> bool:
        """Can only this machine reach it?"""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def read_topology(path: Path) -> Fabric:
    """What a topology file says.

    Raises:
        FormatError: it is none, or not there.
    """
    try:
        return Fabric.parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is no text: {error}") from error
    except OSError as error:
        raise FormatError(f"the topology file {path} cannot be read: {error.strerror}") from error


def state_folder() -> Path:
    """Where a manager keeps its file unless told otherwise."""
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "zerostall"
    try:
        return Path.home() / ".local" / "state" / "zerostall"
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / f"zerostall-state-{os.getuid()}"
