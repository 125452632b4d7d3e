"""What ranks share and a device has is looked at by the device, in the order of training's work; devices are played."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from standin.training import SIZES, Trainer
from zerostall import native

pytestmark = pytest.mark.usefixtures("own_agent")

Start = Callable[..., Trainer]


def test_nobody_waits_for_the_checksums_of_what_ranks_share(start_on_stand_in: Start) -> None:
    trainer = start_on_stand_in(other="alike")
    trainer.ask("fake", "hold", trainer.ask("stream"))  # a long kernel
    trainer.ask("fill", 2)
    trainer.ask("save", 1)
    trainer.ask("guard")  # on the stream
    trainer.ask("fill", 3)
    trainer.ask("fake", "release")
    assert trainer.ask("wait", 1, "host") == ""
    assert trainer.ask("sums") == {f"t{k}": native.crc32c(bytes([2]) * (4 * size)) for k, size in enumerate(SIZES)}
    assert trainer.ask("fallbacks") == []


def test_what_differs_is_named_and_no_image_of_it_is_sealed(start_on_stand_in: Start) -> None:
    trainer = start_on_stand_in(other="odd")
    trainer.ask("fill", 2)
    trainer.ask("save", 1)
    told = trainer.ask("wait", 1, "host")
    assert told.startswith("StateError: these ranks should hold the same and do not:\n  t2: rank 0, others on rank 1")
    assert trainer.ask("restore") == 0
