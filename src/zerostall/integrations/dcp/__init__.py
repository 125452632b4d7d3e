"""torch.distributed.checkpoint on zerostall's files: code for `dcp.save`, `async_save` and `load` changes one argument.

>>> from zerostall.integrations.dcp import Reader, Stager, Writer
>>> dcp.save(state_dict, storage_writer=Writer("runs/gpt", step=100))
>>> dcp.async_save(state_dict, storage_writer=Writer("runs/gpt", step=200), async_stager=Stager(optimizer))
>>> dcp.load(state_dict, storage_reader=Reader("runs/gpt"))

What is written is a step of a run like any other: checksummed, committed at once for all ranks, listed by
`zerostall ls`, read by `zerostall.load` and `Checkpointer.restore`. What is read may have been written by a
`Checkpointer`.
"""

from zerostall.integrations.dcp.reader import Reader
from zerostall.integrations.dcp.stager import Stager
from zerostall.integrations.dcp.writer import Writer

__all__ = ["Reader", "Stager", "Writer"]
