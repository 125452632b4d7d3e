"""What it takes to decide that one step of many ranks is clean: their messages, the roll call, the manifest.

    python -m benchmarks.commit [--ranks 16384] [--rounds 20]

On the agent of rank 0's node, which hears of every rank's image by a message of its own. Most of that is done while the
ranks are still coming; the decision is what is left from the last rank's message to the bytes of the manifest, which
go to disk when the step does. In processor time of one thread, which a busy machine lengthens little.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.report import Report, median, percentile, seconds
from zerostall.core import checksum, values
from zerostall.core import manifest as manifests
from zerostall.core.layout import CHUNK
from zerostall.core.manifest import Manifest, Record
from zerostall.core.roll import Roll, Save
from zerostall.wire import nodes as n

GOAL = 0.1
IMAGE = 8 << 30


def messages(ranks: int, save: Save) -> list[bytes]:
    """What each rank's agent says of an image of 8 GiB."""
    sums = [4_000_000_000 + number for number in range(IMAGE // CHUNK)]
    one = Record(
        run="a" * 32,
        step=save.step,
        rank=0,
        world=ranks,
        layout=hashlib.sha256(b"layout").hexdigest(),
        nbytes=IMAGE,
        chunk_bytes=CHUNK,
        checksums=sums,
        checksum=checksum.whole(sums, IMAGE, CHUNK),
        values=values.encode({"step": save.step}),
        created=1.0,
    )
    facts = manifests.facts(one, manifests.encode_record(one))
    begins = (1, 2, 3, 4)
    return [
        msgspec.msgpack.encode(n.Sealed(save, msgspec.structs.replace(facts, rank=rank, begins=begins), 1.0))
        for rank in range(ranks)
    ]


def decide(said: list[bytes], save: Save) -> tuple[float, float, int]:
    """Seconds until all but the last rank are entered, and from there to the manifest; its bytes."""
    decoder = msgspec.msgpack.Decoder(n.Sealed)
    roll, facts = Roll(len(said)), {}
    start = time.thread_time()
    for data in said[:-1]:
        message = decoder.decode(data)
        facts[message.facts.rank] = message.facts
        assert not roll.sealed(message.facts.rank, message.save, 0.0).clean
    nearly = time.thread_time()
    last = decoder.decode(said[-1])
    facts[last.facts.rank] = last.facts
    assert roll.sealed(last.facts.rank, last.save, 0.0).clean == (save,)
    ranks = tuple(facts[rank] for rank in range(len(said)))
    written = manifests.encode_manifest(Manifest(run="a" * 32, step=save.step, world=len(said), ranks=ranks))
    return nearly - start, time.thread_time() - nearly, len(written)


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.commit", description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=16_384)
    options.add_argument("--rounds", type=int, default=20)
    arguments = options.parse_args()
    save = Save(1, 123_456)
    said = messages(arguments.ranks, save)
    rounds = [decide(said, save) for _ in range(arguments.rounds)]
    entering, deciding = [one for one, _, _ in rounds], [one for _, one, _ in rounds]
    page = Report(
        "commit",
        f"Whether one step of {arguments.ranks} ranks is clean: processor time of the one agent that decides",
        Path(tempfile.gettempdir()),
        columns=("what", "median", "slowest"),
    )
    both = [one + other for one, other in zip(entering, deciding, strict=True)]
    for what, samples in {
        "all but the last rank's messages, as they come": entering,
        "from the last rank's message to the manifest's bytes": deciding,
        "together": both,
    }.items():
        page.rows.append((what, seconds(median(samples)), seconds(percentile(samples, 1.0))))
        page.samples[f"{what} s"] = samples
    page.rows.append(("bytes of a message; of the manifest", str(len(said[-1])), str(rounds[0][2])))
    page.goals["the decision for one step in under 100 ms"] = seconds(percentile(deciding, 1.0))
    page.notes = [
        f"{arguments.rounds} rounds; the manifest is written to disk after that, as the last file of the step"
    ]
    page.write()


if __name__ == "__main__":
    main()
