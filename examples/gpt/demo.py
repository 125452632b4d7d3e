"""Shows what zerostall is for: kill -9 at a random moment, go on within seconds, end with the very same bits.

    make demo                            # or: python examples/gpt/demo.py [--short] [--seed N]

1. Trains a small GPT undisturbed and keeps the digest of its final weights and optimizer state.
2. Trains it again with a checkpoint after every step. Kills the trainer at a random moment; it resumes from the memory
   that the agent kept. Kills trainer and agent; it resumes from disk.
3. Runs the same loop with zerostall, torch.save and DCP async_save, and shows what each costs.

Exits with 1 unless the final weights are equal bit for bit. Uses an agent of its own, which is gone at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from compare import compare
from trainer_process import Killed, Trainer

ROOT = Path(__file__).resolve().parents[2]


def watch(console: Console, trainer: Trainer, label: str, last: int, *, kill_at: int | None, pause: float) -> None:
    """Shows the steps of a trainer until its end, or kills it `pause` seconds after step `kill_at`."""
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=last, loss="starting")
        for step, loss in trainer.steps():
            progress.update(task, completed=step, loss=f"loss {loss:.3f}")
            if step == kill_at:
                time.sleep(pause)
                trainer.kill()
                progress.update(task, loss="[red]SIGKILL")
                return
        progress.update(task, loss="[green]done")


def recovery_row(name: str, killed: Killed, trainer: Trainer) -> tuple[str, ...]:
    """What a restart took, from the kill to the next finished step."""
    resumed = trainer.restored
    assert resumed is not None and trainer.first_step_at is not None
    return (
        name,
        f"{killed.step}",
        f"{resumed.step} from {resumed.tier}",
        f"{killed.step - resumed.step}",
        f"{resumed.at - resumed.seconds - killed.at:.2f} s",
        f"{resumed.seconds * 1e3:.0f} ms",
        f"{trainer.first_step_at - resumed.at:.2f} s",
        f"[bold]{trainer.first_step_at - killed.at:.2f} s",
    )


def kill_and_resume(console: Console, arguments: argparse.Namespace, folder: Path, expected: str) -> bool:
    """Part 2: two kills, two restarts; True when the end is bit-equal to `expected` and both tiers did their part."""
    chance = random.Random(arguments.seed)
    steps = arguments.steps
    kills = (chance.randint(steps // 6, steps // 3), chance.randint(steps // 2, steps * 3 // 4))
    recoveries = []
    trainer = Trainer(steps, folder)
    watch(console, trainer, "with a checkpoint every step", steps, kill_at=kills[0], pause=chance.random() * 0.2)
    killed = trainer.killed
    trainer = Trainer(steps, folder)
    watch(console, trainer, "restarted", steps, kill_at=kills[1], pause=chance.random() * 0.2)
    recoveries.append(recovery_row("trainer killed", killed, trainer))
    first_tier = trainer.restored.tier if trainer.restored else "nowhere"
    trainer.kill_agent()
    killed = trainer.killed
    trainer = Trainer(steps, folder)
    watch(console, trainer, "restarted without the old agent", steps, kill_at=None, pause=0)
    recoveries.append(recovery_row("both killed", killed, trainer))
    second_tier = trainer.restored.tier if trainer.restored else "nowhere"

    table = Table(title="From kill -9 to the next finished step", title_justify="left")
    for head in ("", "at step", "resumed at", "steps lost", "new process, imports", "restore", "first step", "in all"):
        table.add_column(head, justify="left" if not head else "right")
    for row in recoveries:
        table.add_row(*row)
    console.print(table)

    equal = trainer.digest == expected
    console.print(f"digest, undisturbed      {expected}")
    console.print(f"digest, killed twice     {trainer.digest}")
    console.print("[bold green]bit-equal" if equal else "[bold red]NOT EQUAL")
    if (first_tier, second_tier) != ("host", "disk"):
        console.print(f"[bold red]resumed from {first_tier}, then {second_tier}; expected host, then disk")
    return equal and (first_tier, second_tier) == ("host", "disk")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer steps and shorter comparison, for CI")
    parser.add_argument("--steps", type=int, help="training steps (default: 48, short: 20)")
    parser.add_argument("--seed", type=int, help="of the moments of the kills (default: random)")
    parser.add_argument("--plot", type=Path, default=ROOT / "build" / "demo.png", help="where the plot goes")
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (20 if arguments.short else 48)
    arguments.seed = random.randrange(10_000) if arguments.seed is None else arguments.seed
    if arguments.steps < 12:
        parser.error("--steps: at least 12, so that there is room for two kills")

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        Panel(
            "A small GPT learns the source of Python's standard library, on the CPU, a checkpoint after every step.\n"
            f"The trainer is killed with SIGKILL at random moments (seed {arguments.seed}).\n"
            f"It takes {'a minute or so' if arguments.short else 'up to three minutes'} on two idle cores.",
            title="zerostall",
            title_align="left",
        )
    )
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="zerostall-demo-"))
    os.environ["ZEROSTALL_RUNTIME_DIR"] = str(folder / "agent")
    try:
        undisturbed = Trainer(arguments.steps, None)
        watch(console, undisturbed, "undisturbed, no checkpoints", arguments.steps, kill_at=None, pause=0)
        good = kill_and_resume(console, arguments, folder / "run", undisturbed.digest)
        compare(console, folder, arguments.plot, short=arguments.short)
    finally:
        stop = [sys.executable, "-m", "zerostall.cli", "agent", "stop", "--force"]
        subprocess.run(stop, capture_output=True, timeout=60, check=False)
        shutil.rmtree(folder, ignore_errors=True)
    console.print(f"{time.monotonic() - start:.0f} s in all")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
