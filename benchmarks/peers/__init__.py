"""Ways to checkpoint a training loop, behind one face, each called at its best known setting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.peers.contract import Nothing, Peer
from benchmarks.peers.copies import PlainCopies
from benchmarks.peers.files import DcpDefault, DcpStager, TorchSave
from benchmarks.peers.others import DLRover, LmResiliency, Nvrx, TorchCheckpointing
from benchmarks.peers.ours import Zerostall

Maker = Callable[..., Peer]  # of a training and a folder

OURS: dict[str, Maker] = {
    "overlap": partial(Zerostall, policy="overlap"),
    "freeze": partial(Zerostall, policy="freeze"),
    "flip": partial(Zerostall, policy="flip"),
    "auto": partial(Zerostall, policy="auto"),
    "peer": partial(Zerostall, policy="overlap", peer=True),
}
BARE = ("none", "plain-copies")  # no systems, but what there is to compare them with
FLIPPING = ("flip", "auto")  # with the optimizer of zerostall.optim
PEERS: dict[str, Maker] = {
    "none": Nothing,
    "plain-copies": PlainCopies,
    "torch.save": TorchSave,
    "dcp": DcpDefault,
    "dcp-stager": DcpStager,
    "torch_checkpointing": TorchCheckpointing,
    "lm-resiliency": LmResiliency,
    "nvrx": Nvrx,
    "dlrover": DLRover,
    **OURS,
}
LABELS = {
    "none": "no checkpoint",
    "plain-copies": "the bytes copied, no more",
    "torch.save": "torch.save",
    "dcp": "DCP async_save, as in its tutorial",
    "dcp-stager": "DCP async_save, asynchronous stager",
    "torch_checkpointing": "torch_checkpointing",
    "lm-resiliency": "lm-resiliency (in memory)",
    "nvrx": "NVRx",
    "dlrover": "DLRover (shared memory)",
    **{name: f"**zerostall** ({name})" for name in OURS},
}
