"""The recovery drill: a node dies while it trains; how long until the next finished step on another one.

    python -m benchmarks.drill [--gigabytes 1.0] [--rounds 3]

Three nodes (network namespaces of this machine, each with its own agent) and a manager with default settings. A
trainer on the first saves every step; its images are replicated to another node's memory. Then every process of that
node is killed at once and its link is cut. As soon as the manager says that the node is lost, the job is started again
where its image is:

    detect      kill -> the manager says that the node is lost
    decide      -> it has chosen the step to go back to
    fetch       -> the image is in a living node's memory
    start       -> the new trainer's interpreter has torch
    restore     -> zerostall is there and `restore()` has returned
    first step  -> the next step is finished

In the end the weights are compared with those of a run that was never disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.namespaces import Network, missing
from benchmarks.nodes import Cluster, undisturbed, until
from benchmarks.report import RESULTS, Report, median, seconds

PHASES = ("detect", "decide", "fetch", "start", "restore", "first step")
_GOAL = "next finished step under 10 s at 1 GB of state, default settings"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="weights and optimizer state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--more-steps", type=int, default=5, help="after the recovery, before weights are compared")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the report")
    options = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"the drill cannot be run here: {reason}")
    with tempfile.TemporaryDirectory(prefix="zerostall-drill-") as name:
        folder = Path(name)
        rounds = [drill(folder / str(k), options.gigabytes, options.more_steps) for k in range(options.rounds)]
        report = Report(
            "drill", f"A node dies: until the next finished step, {options.gigabytes:g} GB of state", folder
        )
        report.columns = ("", *PHASES, "in all")
        for number, found in enumerate(rounds, 1):
            phases = (seconds(found.took[phase]) for phase in PHASES)
            report.rows.append((f"round {number}", *phases, seconds(found.in_all)))
        in_all = [found.in_all for found in rounds]
        report.samples = {f"{phase} seconds": [found.took[phase] for found in rounds] for phase in PHASES}
        report.samples["in all seconds"] = in_all
        report.goals[_GOAL] = f"{seconds(median(in_all))}, at most {seconds(max(in_all))}"
        report.goals["weights bit-equal to an undisturbed run"] = "yes" if all(f.equal for f in rounds) else "NO"
        report.notes = [
            f"restored from: {', '.join(sorted({found.source for found in rounds}))}",
            f"steps finished but not replicated when the node died: {[found.steps_lost for found in rounds]}",
            "three nodes, their agents, the manager and both trainers share this machine's cores",
            "heartbeats every second; a node is suspected after 2.5 s of silence and lost after 5 s",
        ]
        print(report.write(options.results).with_suffix(".md").read_text())


@dataclass
class Round:
    """What one drill found; times in seconds."""

    took: dict[str, float] = field(default_factory=dict)
    source: str = ""
    steps_lost: int = 0
    equal: bool = False

    @property
    def in_all(self) -> float:
        return sum(self.took.values())


def drill(folder: Path, gigabytes: float, more_steps: int) -> Round:
    """Kill the node that trains, and go on on another one."""
    folder.mkdir(mode=0o700)
    where = folder / "run"
    budget = f"{int(gigabytes * 4096) + 256}M"
    cluster = Cluster(Network(), folder, "n1", "n2", "n3", budget=budget)
    try:
        for name in ("n2", "n3"):
            cluster.start_agent(name)
        victim = cluster.train("n1", where, gigabytes)
        victim.until("step", at_least=5)
        until(lambda: (run := cluster.run()) is not None and run.replicated > 0 and (run.target or 0) >= 3)
        found = Round()
        clock = time.time()

        def passed(phase: str, at: float) -> None:
            nonlocal clock
            found.took[phase] = max(0.0, at - clock)
            clock = max(clock, at)

        cluster.nodes["n1"].kill()
        until(lambda: cluster.health("n1") == "lost")
        passed("detect", time.time())
        until(lambda: any(event.kind == "rollback" for event in cluster.state().events))
        passed("decide", time.time())
        until(lambda: (run := cluster.run()) is not None and not run.waiting and cluster.holder() is not None)
        passed("fetch", time.time())
        again = cluster.train(cluster.holder() or "n2", where, gigabytes)
        passed("start", again.until("ready")["at"])
        restored = again.until("restored")
        passed("restore", restored["at"])
        first = again.until("step")
        passed("first step", first["at"])
        found.source = str(restored["from"])
        found.steps_lost = victim.kill() - int(restored["step"])
        last = again.until("step", at_least=int(first["step"]) + more_steps)
    finally:
        cluster.close()
    found.equal = last["digest"] == undisturbed(folder, gigabytes, int(last["step"]))
    return found


if __name__ == "__main__":
    main()
