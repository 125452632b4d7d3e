"""Runs every benchmark, each in a process of its own, then fills the table of README.md from what they found."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.machine import ROOT
from benchmarks.readme import fill

ALL = ("save_call", "loop_time", "disk", "memory")


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=ALL, help=f"some of {', '.join(ALL)}")
    failed = []
    for name in options.parse_args().names:
        start = time.monotonic()
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=False).returncode:
            failed.append(name)
            continue
        print((ROOT / "benchmarks" / "results" / f"{name}.md").read_text())
        print(f"({time.monotonic() - start:.0f} s)\n", flush=True)
    fill()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
