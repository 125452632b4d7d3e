"""`python -m zerostall.agent`: take the lock, listen, serve. Started by trainers; seldom by hand."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from zerostall import config
from zerostall.agent.door import Door
from zerostall.agent.membership import join
from zerostall.agent.service import Service
from zerostall.errors import ZerostallError
from zerostall.telemetry import log
from zerostall.wire import rendezvous, token


def main(arguments: list[str]) -> int:
    """Serve until idle or stopped; 0 when it ended well or another agent serves the folder already."""
    parser = argparse.ArgumentParser(prog="zerostall.agent", description=__doc__)
    parser.add_argument("--runtime-dir", type=Path, default=None, help="folder of the socket, lock and log")
    parser.add_argument("--detach", action="store_true", help="go on in a process of its own and return at once")
    options = parser.parse_args(arguments)
    # Whatever the umask of who started it: the agent's own files are its owner's alone. Those of a run get the modes
    # that its trainer's umask asks for.
    os.umask(0o077)
    try:
        settings = config.AgentSettings.from_environment()
        member = config.MemberSettings.from_environment(settings.host_budget)
        if member is not None:
            token.read(member.token_file)  # what would keep it from starting is said before it detaches
        folder = rendezvous.private_folder(options.runtime_dir or settings.runtime_dir)
    except (ValueError, ZerostallError) as error:
        print(f"zerostall agent: {error}", file=sys.stderr)
        return 2

    # Detach before anything starts a thread. The parent ends at once, so whoever launched us has no child to reap.
    if options.detach and os.fork() > 0:
        return 0
    try:
        door = Door(folder)
    except BlockingIOError:
        return 0
    with contextlib.suppress(OSError):  # the agent never pushes training off a core when it wakes up
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    service = Service(settings, door)
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    signal.signal(signal.SIGINT, lambda *_: service.stop())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log.info("agent %d serves %s, budget %d bytes", os.getpid(), folder, settings.host_budget)
    membership = join(service, member)
    try:
        service.serve(membership.close)
    finally:
        door.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
