"""Optimizers that need not wait for a snapshot: what is still to be read they leave where it is.

>>> optimizer = zerostall.optim.AdamW(model.parameters(), lr=3e-4)      # as torch.optim.AdamW(fused=True)
>>> ckpt = zerostall.Checkpointer("runs/gpt", policy="flip", model=model, optimizer=optimizer)

This package imports torch; Triton is imported when the first step on a CUDA device is taken.
"""

from __future__ import annotations

from zerostall.optim.adamw import AdamW
from zerostall.optim.lion import Lion
from zerostall.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "Lion"]
