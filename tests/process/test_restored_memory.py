"""A restore into objects that have no state yet: no second copy of it, and training takes no more than without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import stop_agent
from forked import python

SAVE = """
import sys, zerostall
import json, re, threading, time, torch
from pathlib import Path

def private():
    "Of this process's memory what no other shares: what is mapped of the agent's is the agent's."
    return int(re.findall(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[0]) * 1024

def job(steps):
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    train(model, optimizer, steps)
    return model, optimizer

def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(4, 2048)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

where = sys.argv[1]
"""
STORE = """
model, optimizer = job(2)
with zerostall.Checkpointer(where, model=model, optimizer=optimizer) as ckpt:
    ckpt.save(1).wait("disk", timeout=120)
"""
RESTORE = """
model, optimizer = job(0)
before, seen, over = private(), [], threading.Event()

def look():
    while not over.wait(0.0005):
        seen.append(private())

with zerostall.Checkpointer(where, model=model, optimizer=optimizer) as ckpt:
    watcher = threading.Thread(target=look)
    watcher.start()
    assert ckpt.restore() == 1
    over.set()
    watcher.join()
    source = ckpt.stats.restored_from
made = sum(t.nbytes for slots in optimizer.state.values() for t in slots.values())
after = private()
train(model, optimizer, 1)
print(json.dumps({"source": source, "made": made, "looks": len(seen), "peak": max(seen) - before - made,
                  "kept": after - before - made, "steady": private()}))
"""
FRESH = """
model, optimizer = job(3)
print(json.dumps({"steady": private()}))
"""
SLACK = 48 << 20
"""Of a state of 400 MB: buffers of a few chunks, threads' stacks, what torch keeps."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("source", ["host", "disk"])
def test_there_is_no_second_copy(agent_environment: dict[str, str], tmp_path: Path, source: str) -> None:
    environment = {**agent_environment, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

    def said(code: str) -> dict:
        done = python("-c", SAVE + code, tmp_path / "run", environment=environment, seconds=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout or "{}")

    said(STORE)
    if source == "disk":
        stop_agent(Path(agent_environment["ZEROSTALL_RUNTIME_DIR"]))
    found, fresh = said(RESTORE), said(FRESH)
    assert found["source"] == source and found["looks"] > 5
    assert found["made"] > 250 << 20
    assert found["peak"] < SLACK and found["kept"] < SLACK, found
    assert found["steady"] < fresh["steady"] + SLACK, (found, fresh)
