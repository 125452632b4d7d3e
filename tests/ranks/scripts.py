"""Ranks that run a script of a test's own: its words are the rank, the file by which they meet, and the test's."""

from __future__ import annotations

import os
from pathlib import Path

import forked


def said_by_ranks(size: int, script: str, folder: Path, *words: object) -> list[str]:
    """What each rank printed, once all have ended well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"said-{rank}" for rank in range(size)]
    ranks = [
        forked.start("-c", script, rank, folder / "store", *words, environment=environment, output=output)
        for rank, output in enumerate(outputs)
    ]
    codes = [child.wait(280) for child in ranks]
    said = [child.printed() for child in ranks]
    assert not any(codes), (codes, said)
    return said
