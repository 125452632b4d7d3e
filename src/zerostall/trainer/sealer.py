"""The thread that finishes what `save` began: waits for the copy, looks for tears, writes the record, tells the agent."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from zerostall.core import checksum
from zerostall.core import manifest as manifests
from zerostall.core.layout import CHUNK
from zerostall.core.manifest import Record
from zerostall.errors import StateError, TornError, ZerostallError
from zerostall.flow.worker import Worker
from zerostall.trainer.flight import Flight
from zerostall.trainer.link import Link
from zerostall.trainer.memory import Shelf
from zerostall.wire import messages as m

_NAMED = 5


class Sealer:
    """One flight at a time, in order. `dirty` hears of each that came to nothing."""

    def __init__(self, shelf: Shelf, link: Link, dirty: Callable[[Flight, ZerostallError], None]) -> None:
        self._shelf = shelf
        self._link = link
        self._dirty = dirty
        self._worker = Worker("zerostall seal")
        self._last: threading.Event | None = None

    def seal(self, flight: Flight) -> None:
        self._last = flight.landed
        self._worker.submit(lambda: self._finish(flight))

    def settle(self) -> None:
        """Wait until the agent has been told of every flight."""
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        self._worker.close(5.0)

    def _finish(self, flight: Flight) -> None:
        try:
            flight.taken.capture.wait(None)
            if torn := flight.torn():
                raise _torn(flight.step, torn)
            record = manifests.encode_record(_record(flight))
        except Exception as error:  # whatever it is, the slot must come back and the user must hear of it
            ours = error if isinstance(error, ZerostallError) else StateError(f"step {flight.step}: {error!r}")
            self._shelf.discarded(flight.taken.slot)
            self._dirty(flight, ours)
            self._link.tell(m.Discarded(slot=flight.taken.slot, step=flight.step, reason=str(ours.args[0])))
        else:
            self._shelf.sealed(flight.taken.slot, record)
            self._link.tell(msgspec.structs.replace(flight.wish, record=record))
        finally:
            flight.landed.set()


def _record(flight: Flight) -> Record:
    layout = flight.taken.layout
    sums = flight.taken.capture.checksums
    return Record(
        run=flight.run,
        step=flight.step,
        rank=0,
        world=1,
        layout=layout.digest,
        nbytes=layout.nbytes,
        chunk_bytes=CHUNK,
        checksums=sums,
        checksum=checksum.whole(sums, layout.nbytes, CHUNK),
        values=flight.taken.values.encode(),
        metric=flight.metric,
        created=flight.created,
    )


def _torn(step: int, names: list[str]) -> TornError:
    listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return TornError(
        f"step {step}: changed while they were captured: {listed}",
        hint="wrap what changes them in `with ckpt.guard():`, or pass their optimizer to the Checkpointer",
    )
