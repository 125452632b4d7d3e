"""Tells the manager that this node is there and what it holds, and brings back what should be so.

It has threads and a connection of its own. The agent's loop is asked for a look around by a posted call and never
waited on for long; a trainer never comes near. Without a manager everything goes on: only its services are missing.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from typing import TYPE_CHECKING

import zerostall
from zerostall.agent.holdings import Census, DiskCensus, DiskNotes, joined
from zerostall.agent.whereabouts import connection
from zerostall.errors import ManagerError, ZerostallError
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.wire import cluster as w

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerostall.agent.loop_call import Post
    from zerostall.agent.replication import Replication
    from zerostall.agent.upkeep import Upkeep
    from zerostall.config import MemberSettings

INTERVAL = 1.0
_MOST_PAUSE = 5.0
_LEAVE_SECONDS = 1.0


class Reporter:
    """The node's voice in the cluster. `look` is called on the loop."""

    def __init__(
        self,
        post: Post,
        settings: MemberSettings,
        secret: str,
        look: Callable[[], Census],
        replication: Replication | None,
        upkeep: Upkeep,
    ) -> None:
        self.epoch = 0
        self._post = post
        self._settings = settings
        self._take_census = look
        self._replication = replication
        self._upkeep = upkeep
        self._findings_told = 0
        self._secret = secret
        self._link = connection(settings, secret)
        self._instance = uuid.uuid4().hex
        self._fenced = False
        self._interval = INTERVAL
        self._sequence = 0
        self._version = 0
        self._told = -1
        self._plan = 0
        self._heard = -1
        self._held: tuple[w.RunNote, ...] = ()
        self._census: Census | None = None
        self._asked = False
        self._looked = time.monotonic()
        self._looks: queue.SimpleQueue[Census] = queue.SimpleQueue()
        self._disk_census = DiskCensus()
        self._on_disk: Mapping[str, DiskNotes] = {}
        self._disks = Worker("disk census", bound=2)
        self._looking = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Say goodbye, if the manager is quick to hear it."""
        self._stopping.set()
        self._thread.join(2 * _LEAVE_SECONDS + 2.0)

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        failures, said = 0, ""
        while not self._stopping.is_set():
            start = time.monotonic()
            try:
                self._beat()
            except ZerostallError as error:
                failures += 1
                if str(error.args[0]) != said:
                    said = str(error.args[0])
                    log.warning("%s; training does not need it, it is tried again", said)
            except Exception:  # noqa: BLE001 - whatever it is, the next heartbeat may be well
                failures += 1
                log.exception("a heartbeat failed")
            else:
                if failures:
                    log.info("the manager at %s is heard again", self._settings.manager)
                failures, said = 0, ""
            pause = min(_MOST_PAUSE, self._interval * max(1, failures))
            self._stopping.wait(max(0.0, pause - (time.monotonic() - start)))
        self._leave()

    def _beat(self) -> None:
        self._look()
        try:
            if self.epoch == 0:
                self._join()
            answer = self._report()
        except ManagerError as error:
            if error.kind in ("fenced", "unknown"):
                log.warning("%s; joining again", error.args[0])
                self._fenced = self._fenced or error.kind == "fenced"
                self._join()
                answer = self._report()
            elif error.kind == "late":
                return
            else:
                raise
        if self._replication is not None:
            self._replication.follow(answer)
        self._heard = answer.sequence
        if answer.plan is not None:
            self._plan = answer.plan.version
        if answer.tell_all:
            self._told = -1
        self._interval = min(60.0, max(0.05, answer.interval))

    def _join(self) -> None:
        request = w.Join(
            node=self._settings.node,
            instance=self._instance,
            last_epoch=self.epoch,
            fenced=self._fenced,
            version=zerostall.__version__,
            labels=self._settings.labels,
            peer=self._replication.door.address if self._replication else "",
            offers=self._settings.replica_budget if self._replication else 0,
        )
        joined_in = self._link.post("join", request, w.Joined)
        if joined_in.epoch != self.epoch:
            log.info("node %s is in epoch %d of the cluster", self._settings.node, joined_in.epoch)
        self.epoch, self._interval, self._fenced = joined_in.epoch, joined_in.interval, False
        self._told, self._plan, self._heard = -1, 0, -1

    def _report(self) -> w.Answer:
        self._sequence += 1
        census, replication = self._census, self._replication
        report = w.Report(
            node=self._settings.node,
            epoch=self.epoch,
            sequence=self._sequence,
            version=self._version,
            held=self._held if self._told != self._version else None,
            plan=self._plan,
            heard=self._heard,
            deaf=round(max(0.0, time.monotonic() - self._looked - self._interval), 1),
            host_bytes=census.host_bytes if census else 0,
            host_budget=census.host_budget if census else 0,
            counters=w.Counters(
                sealed_bytes=census.sealed_bytes if census else 0,
                stored_bytes=census.stored_bytes if census else 0,
                sent_bytes=replication.pace.sent if replication else 0,
                received_bytes=replication.received if replication else 0,
                stalls=census.stalls if census else (),
                scrubbed_bytes=self._upkeep.scrubbing.checked,
                damaged=self._upkeep.mending.damaged,
                mended=self._upkeep.mending.mended,
            ),
            findings=self._upkeep.mending.findings(self._findings_told),
            upkeep=self._upkeep.words(),
            pace=replication.pace.words() if replication else "",
        )
        answer = self._link.post("report", report, w.Answer)
        self._told = self._version
        self._findings_told = max([self._findings_told, *(finding.number for finding in report.findings)])
        return answer

    def _leave(self) -> None:
        self._link.close()
        link = connection(self._settings, self._secret, _LEAVE_SECONDS)
        try:
            if self.epoch:
                link.post("leave", w.Leave(self._settings.node, self.epoch), w.Answer)
        except ZerostallError as error:
            log.info("left without a goodbye: %s", error.args[0])
        finally:
            link.close()

    # ----------------------------------------------------------------------------------------------- looking

    def _look(self) -> None:
        """Have the loop look around; a loop that does not answer soon is reported as deaf, with what was last seen."""
        if not self._asked:
            self._asked = True
            self._post(lambda: self._looks.put(self._take_census()))
        try:
            self._census = self._looks.get(timeout=self._interval / 2)
        except queue.Empty:
            return
        self._asked = False
        self._looked = time.monotonic()
        if not self._looking:
            self._looking = True
            disks = self._census.disks
            self._disks.submit(lambda: self._look_at(disks))
        held = joined(self._census, self._on_disk)
        if held != self._held:
            self._held = held
            self._version += 1

    def _look_at(self, disks: tuple) -> None:
        try:
            self._on_disk = self._disk_census.look(disks)
        finally:
            self._looking = False
