"""What people look at: the page in a real browser, the metrics, `zerostall status` and `top`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import aiohttp
import msgspec
import pytest

from cluster import SECONDS, Manager
from forked import cli
from hand import wait_until
from zerostall.manager.page import page
from zerostall.wire import cluster as w
from zerostall.wire import token

ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
GIB = 1 << 30
EVIL = "/runs/<img src=x onerror=alert(1)>"


def populate(manager: Manager) -> None:
    """Three nodes with two ranks each; step 20 is clean and replicated, 30 lacks two ranks whose trainers are gone."""
    link = manager.link()
    for number in range(3):
        name = f"gpu-{number}"
        join = w.Join(node=name, instance=name, labels=f"rack=r{number}", peer=f"127.0.0.1:{9000 + number}", offers=GIB)
        epoch = link.post("join", join, w.Joined).epoch
        ranks = []
        for rank in (2 * number, 2 * number + 1):
            steps = (10, 20) if number == 2 else (10, 20, 30)
            copies = tuple(w.CopyNote(step, "a", "host", 1.0, GIB) for step in steps)
            damaged = (w.DamageNote(19, "chunk 7 of 9 fails its checksum"),) if rank == 0 else ()
            ranks.append(w.RankNote(rank, True, number != 2, copies, 1000, damaged))
        guests = tuple(
            w.RankNote(rank, False, False, (w.CopyNote(20, "a", "replica", 1.0, GIB),))
            for rank in ((2 * number + 2) % 6, (2 * number + 3) % 6)
        )
        whole = (w.CopyNote(10, "a", "disk", 1.0, 6 * GIB),)
        run = w.RunNote("run1", EVIL, 6, (*ranks, *guests), whole, writing=20)
        counters = w.Counters(stalls=(0, 5, 20, 3, *[0] * 12, 1))
        report = w.Report(
            node=name,
            epoch=epoch,
            sequence=1,
            version=1,
            held=(run,),
            host_bytes=GIB,
            counters=counters,
            findings=(w.Finding(1, "damaged", "run1", 0, 19, "host", "chunk 7 of 9 fails its checksum"),)[: not number],
        )
        link.post("report", report, w.Answer)
        if number == 0:  # what is told again is one event
            again = msgspec.structs.replace(report, sequence=2, held=None)
            link.post("report", again, w.Answer)
    link.close()
    wait_until(lambda: _standings(manager) == {10: "clean", 20: "clean", 30: "dirty"}, SECONDS)


def _standings(manager: Manager) -> dict[int, str]:
    run = manager.run()
    return {} if run is None else {snapshot.step: snapshot.standing for snapshot in run.snapshots}


def browse(manager: Manager, *options: str, secret: str = "") -> tuple[str, str]:
    """The page's document after a few seconds of its own time, and what the browser's console says."""
    assert BROWSER is not None
    fragment = f"#token={secret}" if secret else ""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr"]
    done = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=4000", *options, f"{manager.url}/{fragment}"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def visible(document: str) -> str:
    """The text that a reader sees."""
    body = re.sub(r"<(script|style|title)\b.*?</\1>", "", document, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_shows_the_cluster(manager: Manager, tmp_path: Path) -> None:
    populate(manager)
    document, console = browse(manager, "--dump-dom", secret=token.read(manager.token_file))
    text = visible(document)
    assert console == ""
    assert "would cost" in text and "newest clean step 20" in text
    assert "✓ clean" in text and "✕ dirty" in text and "rank 4 has no trainer on node gpu-2 any more" in text
    assert "damaged in memory: step 19 of rank 0: chunk 7 of 9 fails its checksum" in text
    assert text.count("step 19 of rank 0 in the host memory of node gpu-0") == 1
    assert "gpu-0" in text and "3 alive" in text and "≤ 50 µs" in text
    assert "&lt;img" in document and "<img" not in document  # what nodes say is text, whatever is in it
    for width, height in ((1280, 1400), (390, 1400)):
        picture = tmp_path / f"page-{width}.png"
        browse(
            manager,
            f"--window-size={width},{height}",
            f"--screenshot={picture}",
            secret=token.read(manager.token_file),
        )
        header = picture.read_bytes()[16:24]
        assert (int.from_bytes(header[:4]), int.from_bytes(header[4:])) == (width, height)
        assert picture.stat().st_size > 20_000  # an empty page takes far less


async def measured(url: str, profile: Path, ask: str, width: int) -> object:
    """What JavaScript in a window that wide finds on the page, as soon as it finds something."""
    assert BROWSER is not None
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    flags += [f"--user-data-dir={profile}", f"--window-size={width},1400", url]
    quiet = asyncio.subprocess.DEVNULL
    browser = await asyncio.create_subprocess_exec(BROWSER, *flags, stderr=quiet, start_new_session=True)
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as session:
            told = profile / "DevToolsActivePort"
            while not (told.exists() and told.read_text().count("\n")):
                await asyncio.sleep(0.05)
            port = told.read_text().split()[0]
            pages: list[dict[str, str]] = []
            while not pages:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"]) as line:
                for number in itertools.count(1):
                    words = {"expression": ask, "returnByValue": True}
                    await line.send_json({"id": number, "method": "Runtime.evaluate", "params": words})
                    while (heard := await line.receive_json()).get("id") != number:
                        pass
                    if (found := heard["result"]["result"].get("value")) is not None:
                        return found
                    await asyncio.sleep(0.1)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)  # all of its processes
        await browser.wait()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [360, 390, 1280])
def test_the_page_fits_a_phone_and_shows_what_is_on_its_way(manager: Manager, tmp_path: Path, width: int) -> None:
    populate(manager)
    link = manager.link()
    join = w.Join(node="gpu-9", instance="gpu-9", labels="rack=r9", peer="127.0.0.1:9009", offers=GIB)
    epoch = link.post("join", join, w.Joined).epoch
    stop = threading.Event()

    def drain() -> None:
        for sequence in itertools.count(1):
            counters = w.Counters(sealed_bytes=sequence * GIB, stored_bytes=sequence * GIB // 2)
            link.post(
                "report", w.Report(node="gpu-9", epoch=epoch, sequence=sequence, version=1, counters=counters), w.Answer
            )
            if stop.wait(0.3):
                return

    drains = threading.Thread(target=drain)
    drains.start()
    ask = """(() => {
      const rates = [...document.querySelectorAll("#rates > div")].map(one => one.innerText.replace(/\\s+/g, " "));
      const lines = [...document.querySelectorAll("#rates polyline")].map(one => one.getAttribute("points") || "");
      const moving = rates.filter(one => one.includes("/s")).length;
      if (moving < 2 || !document.querySelector("#stalls .bar")) return undefined;
      const page = document.documentElement;
      return {rates, lines, inner: window.innerWidth, wide: page.scrollWidth};
    })()"""
    try:
        secret = token.read(manager.token_file)
        found = asyncio.run(measured(f"{manager.url}/#token={secret}", tmp_path / "profile", ask, width))
    finally:
        stop.set()
        drains.join()
        link.close()
    assert isinstance(found, dict)
    assert found["inner"] == width and found["wide"] <= width, "it scrolls sideways"
    assert len(found["rates"]) == len(found["lines"]) >= 3 and all("," in line for line in found["lines"])
    assert sum("GiB/s" in one or "GB/s" in one for one in found["rates"]) >= 2, found["rates"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_without_the_token_the_page_asks_for_it_and_shows_nothing(manager: Manager) -> None:
    populate(manager)
    text = visible(browse(manager, "--dump-dom")[0])
    assert "token" in text and "gpu-0" not in text


def test_the_page_needs_nothing_from_outside_and_may_do_nothing_else() -> None:
    body, policy = page()
    text = body.decode()
    assert not re.findall(r"(?:src|href)=\"(?!data:)[^\"]+\"", text)
    assert "http" not in text.replace("http://www.w3.org/", "")
    assert "innerHTML" not in text and "eval(" not in text
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("sha256-") == 2


def test_metrics_and_the_board_that_shows_them(manager: Manager) -> None:
    import urllib.request

    populate(manager)
    request = urllib.request.Request(
        f"{manager.url}/metrics", headers={"Authorization": f"Bearer {token.read(manager.token_file)}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    assert 'zerostall_run_clean_step{run="run1"} 20.0' in text
    assert 'zerostall_nodes{health="alive"} 3.0' in text
    assert 'zerostall_node_damaged_images{node="gpu-0"} 1.0' in text
    assert 'zerostall_stall_seconds_bucket{le="+Inf"} 87.0' in text
    board = json.loads((ROOT / "ops" / "grafana" / "zerostall.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"zerostall_\w+", target["expr"]):
                assert f"\n{name}" in text, f"{panel['title']}: no metric {name}"


def test_status_and_top_say_the_same(manager: Manager, agent_environment: dict[str, str]) -> None:
    populate(manager)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        options = ["--manager", manager.url, "--token-file", str(manager.token_file)]
        return cli(agent_environment, arguments[0], *options, *arguments[1:])

    status = call("status")
    assert status.returncode == 0, status.stderr
    assert "3 of 3 nodes alive" in status.stdout and "goes back to step 20" in status.stdout
    assert "step 30 is dirty: rank 4 has no trainer on node gpu-2 any more" in status.stdout
    assert "step 19 of rank 0: chunk 7 of 9" in " ".join(status.stdout.split())
    found = json.loads(call("status", "--json").stdout)
    assert found["nodes"][0]["damaged"] == ["step 19 of rank 0: chunk 7 of 9 fails its checksum"]
    assert [event["kind"] for event in found["events"]].count("damaged") == 1
    assert [run["target"] for run in found["runs"]] == [20]
    of_one = json.loads(call("status", "run1", "--json").stdout)
    assert [run["run"] for run in of_one["runs"]] == ["run1"]
    unknown = call("status", "run2")
    assert unknown.returncode == 1 and "knows no run" in unknown.stderr and "hint: it knows" in unknown.stderr
    top = call("top", "--looks", "2", "--interval", "0.2")
    assert top.returncode == 0 and top.stdout.count("goes back to step 20") == 2

    wrong = call("status", "--token-file", str(_other_token(manager)))
    assert wrong.returncode == 1 and "refuses: no such token" in wrong.stderr and "hint:" in wrong.stderr
    manager.close()
    gone = call("status")
    assert gone.returncode == 1 and "cannot be reached" in gone.stderr and "Traceback" not in gone.stderr


def _other_token(manager: Manager) -> Path:
    path = manager.folder / "other"
    token.make(path)
    return path
