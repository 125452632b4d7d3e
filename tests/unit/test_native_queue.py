"""How much of a capture lies in the device's queue at once, on a stand-in driver."""

from __future__ import annotations

import time

from hand import wait_until
from standin.cuda import FakeCuda, StandIn
from zerostall.native import Capture, Device, Plan, Pool, Segment, Tensors

_CHUNK = 4096
_PARTS = 12_000
_BEGUN = 2_000  # marks: by now 4000 parts have landed at least, and so many more may be queued, but for the queue
_ROOM = 768  # calls in the queue: the driver's holds about a thousand, and who comes then waits with its lock
_AT_A_TIME = 4  # parts, by two calls


def test_the_devices_queue_never_fills_up(fake: FakeCuda, device: Device) -> None:
    pool = Pool("test", 2)
    tensor = StandIn(fake, _PARTS * _CHUNK // 4)
    plan = Plan(nbytes=tensor.nbytes, header=b"", chunk_bytes=_CHUNK, offsets=[0], sizes=[tensor.nbytes])
    sources = Tensors([tensor], [True])
    segment = Segment("test", plan.nbytes)
    segment.pin(device, stretch=2 << 20, threads=2)
    stream = fake.stream()
    fake.delay(20)
    in_flight = 0
    while in_flight < _ROOM // 2:  # a machine that does other things lets it through before this looks
        assert sources.refresh() == []
        before = fake.count("cuStreamWriteValue64")
        capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)])
        wait_until(lambda before=before: fake.count("cuStreamWriteValue64") - before >= _BEGUN, pause=0.0001)
        fake.hold_copies()
        landed, queued, since = -1, -1, time.monotonic()
        while time.monotonic() < since + 0.3:
            seen = capture.nbytes_done // _CHUNK, fake.count("cuStreamWriteValue64") - before
            if seen != (landed, queued):
                (landed, queued), since = seen, time.monotonic()
            time.sleep(0.001)
        in_flight = min(_AT_A_TIME * queued, _PARTS) - landed
        fake.release()
        assert capture.wait(60)
    assert in_flight <= _AT_A_TIME * (_ROOM // 2 + 1)
    pool.close()
