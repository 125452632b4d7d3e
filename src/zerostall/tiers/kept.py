"""The objects of a step in a store: their names, and which of them are not there in full (docs/format.md, 7.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core import steps as names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerostall.core.manifest import Manifest
    from zerostall.tiers.store import Listed


def folder(step: int) -> str:
    """Below which the images and records of a step are."""
    return f"{names.IMAGES}/{names.step_folder(step)}"


def objects_of(manifest: Manifest) -> set[str]:
    """The names of the objects that a manifest speaks of, below `folder`."""
    return {
        name
        for rank in manifest.ranks
        for name in (names.kept_image(rank.rank, rank.record), names.kept_record(rank.rank, rank.record))
    }


def missing(manifest: Manifest, there: Mapping[str, Listed]) -> str:
    """In words, what is not there in full of a step; empty where all is."""
    for rank in manifest.ranks:
        image, record = names.kept_image(rank.rank, rank.record), names.kept_record(rank.rank, rank.record)
        if problem := _problem(rank.rank, rank.nbytes, image, record, there):
            return problem
    return ""


def missing_beside(manifest: Manifest, there: Mapping[str, Listed]) -> str:
    """As `missing`, of a folder that was copied into the store: images lie beside the manifest."""
    for rank in manifest.ranks:
        image, record = names.image_file(rank.rank), names.record_file(rank.rank)
        if problem := _problem(rank.rank, rank.nbytes, image, record, there):
            return problem
    return ""


def _problem(rank: int, nbytes: int, image: str, record: str, there: Mapping[str, Listed]) -> str:
    if image not in there or record not in there:
        return f"the image of rank {rank} is not there"
    if there[image].nbytes != nbytes:
        return f"{image} has {there[image].nbytes} bytes, not {nbytes}"
    return ""
