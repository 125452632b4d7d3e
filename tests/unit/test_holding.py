"""What the ranks' folders hold, and what a job on several nodes begins with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.heirs import Holding
from zerostall.core.manifest import RunFacts
from zerostall.errors import FormatError, RunMismatchError
from zerostall.tiers.holding import holding_of
from zerostall.trainer.joining import agree_on_terms
from zerostall.trainer.options import Options
from zerostall.trainer.world import World


def facts(run: str) -> RunFacts:
    return RunFacts(run=run, name="", fingerprint=layouts.fingerprint([]), created=3.0)


class Several:
    """Rank 0 of as many, each on a node of its own; the others' folders hold what they are said to."""

    rank = 0

    def __init__(self, *others: Holding | None) -> None:
        self.others = others
        self.size = 1 + len(others)

    @contextlib.contextmanager
    def excused(self, what: str) -> Iterator[None]:
        yield

    def decide(self, mine: bytes, decide: Callable[[Sequence[bytes]], bytes], *, what: str) -> bytes:
        told = msgspec.json.decode(mine)
        others = [told | {"node": str(n), "holds": msgspec.to_builtins(held)} for n, held in enumerate(self.others)]
        return decide([mine, *map(msgspec.json.encode, others)])


def agreed(world: Several, where: Path) -> Holding | None:
    options = Options(**dict.fromkeys(Options.__dataclass_fields__))  # pyright: ignore
    nodes = agree_on_terms(cast(World, world), where, options, run=None)
    assert nodes is not None and nodes.here == (0,)
    return nodes.elder


def test_an_empty_folder_goes_on_with_the_others_and_never_chooses_between_two(tmp_path: Path) -> None:
    where = tmp_path / "run"
    assert agreed(Several(None, None), where) is None
    assert agreed(Several(None, Holding(facts("a"), 7)), where) == Holding(facts("a"), 7)
    with pytest.raises(RunMismatchError, match="run a on rank 1 and 1 more; run b on rank 3"):
        agreed(Several(Holding(facts("a")), Holding(facts("a")), Holding(facts("b"))), where)
    assert not where.exists()
    where.mkdir()
    (where / "run.json").write_bytes(manifests.encode_run(facts("b")))
    assert agreed(Several(Holding(facts("a"), 9), Holding(facts("b"), 4)), where) == Holding(facts("b"), 4)


def test_what_a_folder_holds(tmp_path: Path) -> None:
    assert holding_of(tmp_path / "none") is None
    assert holding_of(tmp_path) is None
    (tmp_path / "step-000000000003").mkdir()
    committed = tmp_path / "step-000000000002"
    committed.mkdir()
    (committed / "manifest.json").touch()
    assert holding_of(tmp_path) is None, "nobody can read that manifest, and nothing else says that it is a run"
    run = tmp_path / "run.json"
    run.write_bytes(manifests.encode_run(facts("a")))
    assert holding_of(tmp_path) == Holding(facts("a"), 2)
    run.write_bytes(run.read_bytes()[:-9])
    with pytest.raises(FormatError, match=r"run\.json"):
        holding_of(tmp_path)
