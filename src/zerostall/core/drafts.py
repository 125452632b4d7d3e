"""Whether a step that was put in a run's folder, and not committed there, may be committed on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def may_be_committed(step: int, ranks: Collection[int], oldest: int | None, *, own: bool) -> tuple[bool, str]:
    """Decide for the folder of rank 0's node, which was another node's before, perhaps; and why.

    Args:
        ranks: whose images were put.
        oldest: of the committed steps here; None where there are none.
        own: the folder is this node's own, or may be.
    """
    if not ranks:
        return False, "no image of it is whole"
    if 0 in ranks:
        return False, "rank 0 was here when it was put, and who has rank 0 commits first"
    if not own:
        return False, "all nodes share the folder"
    if oldest is not None and step < oldest:
        return False, "the steps that were kept are newer"
    return True, "another node had rank 0 when it was put"
