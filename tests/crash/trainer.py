"""The trainer that gets killed. Prints what it has reached; what it restores it checks bit for bit.

python -m crash.trainer WHERE --steps 100        (from tests/, or through crash.nursery)
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path

import torch

import zerostall
import zerostall.trainer.checkpointer
from crash.live import Run
from crash.states import Job

# What torch and zerostall load only when it is first used is loaded before the fork; threads would not outlive it.
torch.set_num_threads(1)
Job().train_one_step()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("where")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pause", type=float, default=0.001, help="seconds of work a step")
    parser.add_argument("--when-busy", default="skip")
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--worker", action="store_true", help="fork a child that does nothing, as a data loader does")
    parser.add_argument("--ending", help="save twice and then run this, instead of training")
    options = parser.parse_args(words)
    if options.ending is not None:
        return end(options.where, options.ending)
    job = Job(options.scale)
    with zerostall.Checkpointer(options.where, keep=options.keep, when_busy=options.when_busy, **job.state()) as ckpt:
        step = ckpt.restore()
        print("restored", step, ckpt.stats.restored_from or "nothing", flush=True)
        if problem := job.difference(step):
            print("WRONG", problem, flush=True)
            return 3
        if options.worker:
            start_worker()
        pending: list[zerostall.Saving] = []
        while step < options.steps:
            step = job.train_one_step()
            print("saving", step, flush=True)
            # The last one is asked for afterwards, so it may not be skipped, however busy the machine is.
            pending.append(ckpt.save(step, when_busy="wait" if step == options.steps else None))
            for saving in list(pending):
                for tier in saving.tiers:
                    print("reached", saving.step, tier, flush=True)
                if saving.skipped or "disk" in saving.tiers or saving.step < step - 20:
                    pending.remove(saving)
            time.sleep(options.pause)
    print("done", step, ckpt.stats.agent_restarts, ckpt.stats.failed, flush=True)
    return 0


def end(where: str, code: str) -> int:
    run = Run(Path(where))
    run.save().wait()
    run.ckpt.save(run.job.train_one_step(), when_busy="wait")
    exec(code, {"run": run, "os": os, "sys": sys, "threading": threading, "time": time})
    return 0


def start_worker() -> None:
    worker = os.fork()
    if worker == 0:
        time.sleep(600)
        os._exit(0)
    print("worker", worker, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
