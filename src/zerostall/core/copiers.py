"""How many threads copy tensors while training goes on: a pure decision, from the cores that training leaves alone."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 2
"""Each streams what one core can; a third would take one more core from training, for memory that two keep busy."""

MOST_CHECKING = 8


@dataclass(frozen=True, slots=True)
class Copiers:
    threads: int
    reason: str


def choose(cores: int, training: int | None = None, chosen: int | None = None) -> Copiers:
    """For state in host memory.

    Args:
        cores: that this process may use.
        training: threads that compute there; None where that is not known: they may be as many as the cores.
        chosen: what the user says.
    """
    if chosen is not None:
        return _as_chosen(chosen)
    if cores == 1:
        return Copiers(1, "there is one core")
    free = cores - min(training if training is not None else cores, cores)
    if free == 1:
        return Copiers(1, f"training computes on {cores - 1} of {cores} cores: one thread takes none from it")
    if free:
        return Copiers(MOST, f"training leaves {free} of {cores} cores alone")
    # Its threads wait for one another, many times a step: what the slowest of them loses, all lose.
    return Copiers(MOST, f"training may compute on all {cores}, and two cores are held up for half as long as one")


def choose_checking(cores: int, chosen: int | None = None) -> Copiers:
    """For state on CUDA devices, whose threads take the checksums of what arrives."""
    if chosen is not None:
        return _as_chosen(chosen)
    return Copiers(max(1, min(MOST_CHECKING, cores // 2)), f"half of {cores} cores keep up with what devices send")


def _as_chosen(threads: int) -> Copiers:
    return Copiers(threads, "ZEROSTALL_COPY_THREADS says so")
