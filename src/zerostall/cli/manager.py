"""`zerostall manager`: the service that watches a cluster."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from zerostall import config
from zerostall.cli.output import say
from zerostall.core.cluster import Patience
from zerostall.errors import CapabilityError
from zerostall.telemetry import log


def manager(
    host: Annotated[
        str, typer.Option(help="address to listen on; of others than 127.0.0.1, think of TLS")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 7077,
    state: Annotated[
        Path | None, typer.Option(help="folder of its file", show_default="~/.local/state/zerostall")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="etcd://host:2379,host:2379: for several managers, of which one leads")
    ] = None,
    store_ca: Annotated[Path | None, typer.Option(help="certificates to check those of etcds:// by")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="the cluster's secret, made if missing", show_default="~/.config/zerostall/token"),
    ] = None,
    interval: Annotated[float, typer.Option(help="seconds between heartbeats")] = 1.0,
    suspect_after: Annotated[float, typer.Option(help="seconds of silence")] = 2.5,
    lost_after: Annotated[float, typer.Option(help="seconds of silence")] = 5.0,
    copies: Annotated[int, typer.Option(help="replicas of each image in other nodes' memory")] = 1,
    topology: Annotated[Path | None, typer.Option(help="file of racks and switches; see docs/cluster.md")] = None,
    certificate: Annotated[Path | None, typer.Option(help="for TLS")] = None,
    key: Annotated[Path | None, typer.Option(help="for TLS")] = None,
) -> None:
    """Watch the cluster: who is there, which steps are clean, where copies go. Serves a dashboard."""
    try:
        from zerostall.manager import process
        from zerostall.manager.etcd import Place
        from zerostall.manager.settings import ManagerSettings, read_topology, state_folder
    except ImportError as error:
        raise CapabilityError(
            f"the manager needs the package {error.name}", hint="pip install 'zerostall[manager]'"
        ) from error
    settings = ManagerSettings(
        state=(state or state_folder()).absolute(),
        token_file=(token_file or config.token_file()).absolute(),
        host=host,
        port=port,
        patience=Patience(interval, suspect_after, lost_after, max(60.0, lost_after)),
        copies=copies,
        certificate=certificate,
        key=key,
        store=Place.parse(store) if store else None,
        store_authorities=store_ca,
        fabric=read_topology(topology.absolute()) if topology else None,
    )
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    if settings.fabric is not None:
        log.info("topology of %s: %s", settings.fabric.source, settings.fabric.words)
    scheme = "https" if certificate else "http"
    name = f"[{host}]" if ":" in host else host

    def ready(bound: int) -> None:
        say(f"manager at {scheme}://{name}:{bound}; the token is in {settings.token_file}")

    process.run(settings, ready)
