"""Which run and step a `checkpoint_id` means."""

from __future__ import annotations

import os
import re
from pathlib import Path

_STEP = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")


def place_of(
    checkpoint_id: str | os.PathLike[str] | None, where: str | os.PathLike[str] | None, step: int | None
) -> tuple[Path | None, int | None]:
    """The run's folder and the step, where a `checkpoint_id` is said (`runs/gpt/step-100`: step 100 of runs/gpt).

    A number alone is a step of the run that is known already. ValueError for one that ends in no number.
    """
    if checkpoint_id is None:
        return (None if where is None else Path(where)), step
    path = Path(checkpoint_id)
    match = _STEP.fullmatch(path.name)
    if match is None:
        raise ValueError(f"checkpoint_id {os.fspath(checkpoint_id)!r} does not end in the number of a step")
    alone = len(path.parts) == 1 and path.name.isdigit()
    return (Path(where) if alone and where is not None else path.parent), int(match[1])


def names_a_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a `checkpoint_id` by itself says which step is meant."""
    try:
        place_of(checkpoint_id, None, None)
    except ValueError:
        return False
    return True
