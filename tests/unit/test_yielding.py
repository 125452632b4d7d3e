"""Images go to other nodes as fast as training's own traffic leaves room: replayed traces of a link."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerostall.agent.pace as module
from zerostall.agent.pace import Pace
from zerostall.core.yielding import LEAST, Allowance, Window, allow, capacity
from zerostall.flow import link_meter
from zerostall.flow.link_meter import LinkMeter

LINK = 1.25e9  # 10 Gbit/s
HALF = 0.5


def test_alone_on_the_link_the_bound_is_all_that_counts() -> None:
    quiet = [Window(HALF, 420_000_000, 400_000_000)]  # with headers
    assert allow(quiet, LINK, None).rate is None
    assert allow(quiet, LINK, 1e8).rate == 1e8
    assert allow([], 0.0, None).rate is None


def test_what_others_need_is_left_to_them_twice() -> None:
    windows = [Window(HALF, 100_000_000, 0), Window(HALF, 10_000_000, 0)]  # the higher one counts
    allowance = allow(windows, LINK, None)
    assert allowance == Allowance(LINK - 2 * 200e6, "others send up to 200 MB/s of 1250 MB/s")
    assert allow(windows, LINK, 1e8).rate == 1e8


def test_a_full_link_leaves_a_little_so_that_copies_arrive_at_last() -> None:
    assert allow([Window(HALF, int(LINK * HALF), 0)], LINK, None).rate == pytest.approx(LEAST * LINK)


def test_where_a_device_says_no_speed_the_most_that_was_seen_is_it() -> None:
    assert capacity(LINK, [Window(HALF, 10, 0)], 5.0) == LINK
    assert capacity(0.0, [Window(HALF, 100, 10), Window(HALF, 60, 10)], 150.0) == 200.0
    assert capacity(0.0, [Window(HALF, 100, 0)], 150.0) == 150.0  # it might have carried more


def test_the_first_images_find_out_what_a_link_carries_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, [LINK / 8], nominal=0.0)
    with link.pace.giving():
        link.rate(0.4)
        assert "is being found out" in link.pace.words()
        link.rate(3.0)
        assert link.rate(6.0) > 0.4 * LINK  # and then an eighth, twice, is left to others


class Link:
    """A link, a clock and a meter in one: training sends as a trace says, images as they are let pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, training: list[float], nominal: float = LINK) -> None:
        self.now = 1000.0
        self.total = 0
        self.training = training
        self.pace = Pace(None, LinkMeter("link", (), nominal=nominal))
        monkeypatch.setattr(LinkMeter, "sent", lambda _: int(self.total))
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self.pass_time)

    def pass_time(self, seconds: float) -> None:
        """Training's bytes go out meanwhile: a tenth of a second of its trace after the other, over and over."""
        while seconds > 1e-9:
            tick = int((self.now - 1000.0) * 10 + 1e-6)
            step = min(seconds, (tick + 1) / 10 - (self.now - 1000.0))
            self.total += self.training[tick % len(self.training)] * step
            self.now += step
            seconds -= step

    def rate(self, seconds: float) -> float:
        """Bytes of images a second, over the next seconds; each piece takes its time on the link."""
        begin, before = self.now, self.pace.sent
        while self.now - begin < seconds:
            self.pace.pass_by(4 << 20)
            self.total += 1.05 * (4 << 20)
            self.pass_time((4 << 20) / LINK)
        return (self.pace.sent - before) / (self.now - begin)


def test_replayed_bursts_of_training_slow_images_down_and_its_end_lets_them_go(monkeypatch: pytest.MonkeyPatch) -> None:
    reduces = [LINK, 0.0, 0.0, 0.0]  # a tenth of a second at full rate in each step of 0.4 s
    link = Link(monkeypatch, reduces)
    link.rate(2.0)
    assert link.rate(4.0) < 0.55 * LINK
    assert "others send up to" in link.pace.words()
    link.training = [0.0]
    link.rate(5.0)
    assert link.rate(4.0) > 0.95 * LINK
    assert link.pace.words() == "images go out at any rate: nobody else uses the link"


def test_what_has_ended_before_an_image_comes_holds_it_up_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, [LINK])
    with link.pace.giving():
        link.rate(3.0)
    link.pass_time(10.0)
    link.training = [0.0]
    with link.pace.giving():
        assert link.rate(4.0) > 0.95 * LINK
    link.pass_time(10.0)
    link.training = [LINK]
    with link.pace.giving():
        assert link.rate(4.0) < 0.1 * LINK  # seen before the first byte


def test_steady_traffic_of_half_the_link_leaves_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, [LINK / 2])
    link.rate(3.0)
    assert link.rate(10.0) == pytest.approx(LEAST * LINK, rel=0.2)


def test_a_meter_that_cannot_be_read_bounds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pace = Pace(None, LinkMeter("gone", (Path("/nowhere/tx_bytes"),)))
    pace.pass_by(1000)
    assert "cannot be read" in pace.words() and "images yield to nobody" in caplog.text


def test_meters_read_what_the_kernel_counts(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    for device in ("eth0", "veth1", "lo"):
        write(f"net/{device}/statistics/tx_bytes", "4096\n")
        write(f"net/{device}/speed", "10000\n")
    (tmp_path / "net/eth0/device").mkdir()
    real, virtual = (link_meter.of_device(name, tmp_path / "net") for name in ("eth0", "veth1"))
    assert real is not None and (real.sent(), real.nominal) == (4096, 1.25e9)
    assert virtual is not None and (virtual.sent(), virtual.nominal) == (4096, 0.0)
    assert link_meter.of_device("lo", tmp_path / "net") is None
    assert link_meter.of_device("", tmp_path / "net") is None
    for device in ("mlx5_0", "mlx5_1"):
        write(f"ib/{device}/ports/1/counters/port_xmit_data", "100\n")
    rdma = link_meter.of_rdma(("mlx5_0", "mlx5_1"), tmp_path / "ib")
    assert rdma is not None and rdma.sent() == 800
    assert link_meter.of_rdma((), tmp_path / "ib") is None
