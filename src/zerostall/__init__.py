"""Checkpointing that PyTorch training does not feel.

>>> with zerostall.Checkpointer("runs/gpt", model=model, optimizer=optimizer) as ckpt:
...     for step in range(ckpt.restore(), num_steps):
...         train_one_step(step)
...         ckpt.save(step + 1)

Importing this package is cheap and does not import torch; the names below load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostall import errors, optim
    from zerostall.core.exchange import ExportOptions, ImportOptions
    from zerostall.core.policy import Remote
    from zerostall.core.retention import Keep
    from zerostall.core.vaults import Peer
    from zerostall.flow.catalog import diff, pin, snapshots, verify
    from zerostall.trainer.checkpointer import Checkpointer
    from zerostall.trainer.exchange.files import export, import_file
    from zerostall.trainer.exchange.loading import load
    from zerostall.trainer.saving import Saving
    from zerostall.trainer.state.rank_local import RankLocal

__version__ = "0.1.0"
__all__ = [
    "Checkpointer",
    "ExportOptions",
    "ImportOptions",
    "Keep",
    "Peer",
    "RankLocal",
    "Remote",
    "Saving",
    "diff",
    "errors",
    "export",
    "import_file",
    "load",
    "optim",
    "pin",
    "snapshots",
    "verify",
]

_MODULES = ("errors", "optim")
_HOMES = {
    "Checkpointer": "zerostall.trainer.checkpointer",
    "ExportOptions": "zerostall.core.exchange",
    "ImportOptions": "zerostall.core.exchange",
    "Keep": "zerostall.core.retention",
    "Peer": "zerostall.core.vaults",
    "RankLocal": "zerostall.trainer.state.rank_local",
    "Remote": "zerostall.core.policy",
    "Saving": "zerostall.trainer.saving",
    "diff": "zerostall.flow.catalog",
    "export": "zerostall.trainer.exchange.files",
    "import_file": "zerostall.trainer.exchange.files",
    "load": "zerostall.trainer.exchange.loading",
    "pin": "zerostall.flow.catalog",
    "snapshots": "zerostall.flow.catalog",
    "verify": "zerostall.flow.catalog",
}


def __getattr__(name: str) -> object:
    if name in _MODULES or name in _HOMES:
        try:
            if name in _MODULES:
                return importlib.import_module(f"zerostall.{name}")
            return getattr(importlib.import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            text = (
                f"zerostall.{name} needs PyTorch, which is not installed: pip install torch (see https://pytorch.org)"
            )
            raise ModuleNotFoundError(text, name="torch") from None
    raise AttributeError(f"module 'zerostall' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
