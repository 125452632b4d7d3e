"""Images through NIXL: the one who wants them reads them out of the other's memory, by RDMA where there is any.

Only memory of the transport itself is ever open to others: it is cut into lanes, a lane a stream, each of some cells.
The giver copies into a free cell and says so (`Laid`) on the agents' connection; the other side reads the cell into one
of its own and gives it back (`Taken`). So no image and no guest's memory can be reached from outside, nothing has to be
registered for an image, and a read that ends late, after its stream broke, harms nobody.

    giver   image → cell ── Laid →          ← Taken          the next piece into that cell
    taker                     read → cell → checked memory
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from zerostall import native
from zerostall.agent.transport import Inlet, Outlet, PlainTcp
from zerostall.errors import CapabilityError
from zerostall.telemetry import log, say_once
from zerostall.wire import peers as p

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from zerostall.wire.peers import PeerChannel

T = TypeVar("T")

CELL = 4 << 20
CELLS = 4
LANES = 6
"""Streams at a time, in and out. Their memory is touched when they are first used, and kept."""

STUCK_SECONDS = 10.0
"""A read that takes so long is given up."""
SHUNNED_SECONDS = 300.0
"""An agent from whom a read failed is asked by plain TCP for so long."""

SHARED = "shm"
"""By memory that agents of one machine share: what the transport is called then."""

_LANE = CELL * CELLS
_LOOK_SECONDS = 0.0002
_GIVE_UP_SECONDS = 2.0


class Engine(Protocol):
    """What is used of `nixl_agent`."""

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None: ...  # noqa: N803 - theirs
    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> object: ...
    def initialize_xfer(self, operation: str, local: object, remote: object, agent: str) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...
    def get_new_notifs(self) -> object: ...


class Ground(msgspec.Struct, frozen=True, array_like=True):
    """Where a giver's cells are: its engine's metadata, and the address of the first."""

    engine: str
    metadata: bytes
    address: int


def load(packages: Sequence[str]) -> ModuleType:
    """NIXL's Python package. Raises CapabilityError: there is none that loads here."""
    problems = []
    for name in packages:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            problems.append(str(error))
        except (ImportError, OSError) as error:
            raise CapabilityError(f"NIXL does not load: {error}") from error
    raise CapabilityError(f"NIXL is not installed: {'; '.join(problems)}")


class Nixl:
    """Raises (on construction): CapabilityError when UCX refuses."""

    name = "nixl"

    def __init__(self, api: ModuleType, node: str, *, shared: bool = False) -> None:
        self.name = SHARED if shared else self.name
        self._engine_name = f"{node} {secrets.token_hex(8)}"
        self._lock = threading.Lock()
        try:
            # Its own thread would take a core for itself. Whoever waits here lets it go on instead.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            engine: Engine = api.nixl_agent(self._engine_name, config)
            # Memory does not tell that the other side has died: with shared memory the deadline of a read does.
            engine.create_backend("UCX", {"ucx_error_handling_mode": "none"} if shared else {})
            self._memory = native.Segment("zerostall-nixl", LANES * _LANE, populate=False)
            region = (self._memory.address, self._memory.nbytes, 0, "")
            self._registered = engine.register_memory([region], "DRAM")
            self._metadata = engine.get_agent_metadata()
        except Exception as error:  # the library's errors have no common class
            told = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
            raise CapabilityError(f"NIXL cannot use UCX here: {type(error).__name__} {error} ({told})") from error
        self._opened: Engine | None = engine
        self._free = list(range(LANES))
        self._known: dict[str, bytes] = {}
        self._shunned: dict[str, float] = {}

    def asks(self, address: str) -> str:
        return self.name if time.monotonic() >= self._shunned.get(address, 0.0) else ""

    def close(self) -> None:
        with self._engine() as engine:
            engine.deregister_memory(self._registered)
            self._opened = None
        self._memory.close()

    @contextlib.contextmanager
    def outlet(self, channel: PeerChannel, asked: str) -> Iterator[Outlet]:
        lane = self._take_lane() if asked == self.name else None
        if lane is None:
            with PlainTcp().outlet(channel, asked) as plain:
                yield plain
            return
        try:
            yield _Laying(self, channel, lane)
        finally:
            self._free.append(lane)

    @contextlib.contextmanager
    def inlet(self, channel: PeerChannel, address: str, ground: bytes) -> Iterator[Inlet]:
        try:
            there = msgspec.msgpack.decode(ground, type=Ground)
        except msgspec.MsgspecError as error:
            raise p.PeerError(f"{address} names no ground: {error}") from error
        lane = self._take_lane()
        if lane is None:
            self._shun(address, "every lane is in use here", 1.0)
            raise p.PeerError(f"no lane is free to read from {address}")
        reading = None
        try:
            reading = _Reading(self, channel, lane, there)
            yield reading
        except ReadError as error:
            self._shun(address, error.args[0], SHUNNED_SECONDS)
            raise
        finally:
            if reading is None or reading.ended():
                self._free.append(lane)
            else:
                say_once(f"lane {lane}", "a read from %s does not end: %d MiB stay with it", address, _LANE >> 20)

    def ground(self, lane: int) -> bytes:
        there = Ground(self._engine_name, self._metadata, self._memory.address + lane * _LANE)
        return msgspec.msgpack.encode(there)

    def cell(self, lane: int, cell: int, nbytes: int) -> memoryview:
        return self._memory.view(lane * _LANE + cell * CELL, nbytes)

    def look(self) -> None:
        """Let UCX go on with what the other sides ask of it."""
        with self._engine() as engine:
            engine.get_new_notifs()

    def know(self, ground: Ground) -> None:
        with self._engine() as engine:
            if self._known.get(ground.engine) != ground.metadata:
                engine.add_remote_agent(ground.metadata)
                self._known[ground.engine] = ground.metadata

    def forget(self, engine: str) -> None:
        """End the connection to it, and so every read that is on its way."""
        with self._engine() as ours:
            if self._known.pop(engine, None) is not None:
                ours.remove_remote_agent(engine)

    def read(self, lane: int, cell: int, nbytes: int, ground: Ground) -> object:
        """Begin to read a cell of the other side into one's own."""
        here = self._memory.address + lane * _LANE + cell * CELL
        with self._engine() as engine:
            local = engine.get_xfer_descs([(here, nbytes, 0)], "DRAM")
            remote = engine.get_xfer_descs([(ground.address + cell * CELL, nbytes, 0)], "DRAM")
            handle = engine.initialize_xfer("READ", local, remote, ground.engine)
            engine.transfer(handle)
        return handle

    def state(self, handle: object) -> str:
        """PROC, DONE or ERR."""
        with self._engine() as engine:
            return engine.check_xfer_state(handle)

    def release(self, handle: object) -> None:
        with self._engine() as engine:
            engine.release_xfer_handle(handle)

    @contextlib.contextmanager
    def _engine(self) -> Iterator[Engine]:
        """The library is called by one thread at a time."""
        with self._lock:
            if self._opened is None:
                raise p.PeerError("this agent is leaving")
            yield self._opened

    def _take_lane(self) -> int | None:
        try:
            return self._free.pop()
        except IndexError:
            say_once("nixl lanes", "more than %d images at a time: some go by plain TCP", LANES)
            return None

    def _shun(self, address: str, why: str, seconds: float) -> None:
        self._shunned[address] = time.monotonic() + seconds
        say_once(f"nixl {address}", "images come from %s by plain TCP for a while: %s", address, why)


class ReadError(p.PeerError):
    """Memory of another agent could not be read."""


class _Laying:
    """The giver's end."""

    def __init__(self, nixl: Nixl, channel: PeerChannel, lane: int) -> None:
        self.ground = nixl.ground(lane)
        self._nixl = nixl
        self._channel = channel
        self._lane = lane
        self._next = self._out = 0

    def send_bytes(self, data: memoryview) -> None:
        for start in range(0, len(data), CELL):
            piece = data[start : start + CELL]
            if self._out == CELLS:
                self._until_taken()
            self._nixl.cell(self._lane, self._next, len(piece))[:] = piece
            self._channel.send(p.Laid(len(piece)))
            self._next = (self._next + 1) % CELLS
            self._out += 1

    def finish(self) -> None:
        while self._out:
            self._until_taken()

    def _until_taken(self) -> None:
        deadline = time.monotonic() + p.SILENCE_SECONDS
        while not self._channel.readable(_LOOK_SECONDS):
            self._nixl.look()
            if time.monotonic() > deadline:
                raise p.PeerError("the other agent has not taken what was laid for it")
        if not isinstance(self._channel.receive(1 << 12), p.Taken):
            raise p.PeerError("the other agent did not say that it took what was laid for it")
        self._out -= 1


class _Reading:
    """The taker's end. Cells are read in their order, as far ahead as there are some."""

    def __init__(self, nixl: Nixl, channel: PeerChannel, lane: int, ground: Ground) -> None:
        self._nixl = nixl
        self._channel = channel
        self._lane = lane
        self._ground = ground
        self._coming: deque[tuple[object, int, int]] = deque()
        self._next = 0
        self._here: memoryview = memoryview(b"")
        _tried(lambda: nixl.know(ground))

    def receive_into(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            if not self._here:
                self._here = self._await_cell()
            some = min(len(view) - done, len(self._here))
            view[done : done + some] = self._here[:some]
            self._here = self._here[some:]
            done += some

    def _await_cell(self) -> memoryview:
        """The next cell's bytes; what was got before has been used up."""
        deadline = time.monotonic() + STUCK_SECONDS
        while True:
            # One of the cells is being handed out, so that only the others may be read into.
            while len(self._coming) < CELLS - 1 and (not self._coming or self._channel.readable(0.0)):
                self._begin()
                deadline = time.monotonic() + STUCK_SECONDS
            handle, cell, nbytes = self._coming[0]
            state = _tried(lambda handle=handle: self._nixl.state(handle))
            if state == "DONE":
                self._coming.popleft()
                self._nixl.release(handle)
                self._channel.send(p.Taken())
                return self._nixl.cell(self._lane, cell, nbytes)
            if self._channel.gone():
                raise p.PeerError("the connection to another agent broke")
            if state != "PROC" or time.monotonic() > deadline:
                raise ReadError("its memory could not be read" + (" in time" if state == "PROC" else ""))
            time.sleep(_LOOK_SECONDS)

    def _begin(self) -> None:
        message = self._channel.receive(1 << 12)
        if not isinstance(message, p.Laid) or not 0 < message.nbytes <= CELL:
            raise p.PeerError("the other agent did not say what it laid ready")
        cell, self._next = self._next, (self._next + 1) % CELLS
        handle = _tried(lambda: self._nixl.read(self._lane, cell, message.nbytes, self._ground))
        self._coming.append((handle, cell, message.nbytes))

    def ended(self) -> bool:
        """Whether nothing will be written into the lane any more. Ends what is on its way."""
        if not self._coming:
            return True
        deadline = time.monotonic() + _GIVE_UP_SECONDS
        with contextlib.suppress(ReadError):
            _tried(lambda: self._nixl.forget(self._ground.engine))
        while self._coming and time.monotonic() < deadline:
            handle = self._coming[0][0]
            try:
                if _tried(lambda handle=handle: self._nixl.state(handle)) == "PROC":
                    time.sleep(_LOOK_SECONDS)
                    continue
                self._nixl.release(handle)
            except Exception as error:  # noqa: BLE001 - the library's errors have no common class
                log.debug("a read that failed: %s", error)
            self._coming.popleft()
        return not self._coming


def _tried(call: Callable[[], T]) -> T:
    """What the library makes of it; ReadError for whichever error it raises."""
    try:
        return call()
    except Exception as error:  # the library's errors have no common class
        raise ReadError(f"{type(error).__name__}: {error}") from error
