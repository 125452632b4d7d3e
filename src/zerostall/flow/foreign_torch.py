"""Other people's files of torch.save, and the folders of torch_checkpointing, which consist of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.quoting import clip
from zerostall.errors import CapabilityError, FormatError
from zerostall.flow.foreign_safetensors import read_safetensors
from zerostall.flow.readable import OpenFile
from zerostall.flow.torch_archive import MAGIC, read_archive
from zerostall.tiers.files import opened, read_file, real

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

_ITEM = re.compile(r"(.+)_([0-9]+)\.(pt|json|safetensors)")
_MAX_JSON = 1 << 26


def is_archive(path: Path) -> bool:
    """Whether a file begins as those that torch.save writes since release 1.6."""
    with opened(real(path)) as fd:
        head = bytearray(4)
        file = OpenFile(fd, path)
        if file.nbytes < len(head):
            return False
        file.read_into(memoryview(head), 0)
        return bytes(head) == MAGIC


def read_torch(path: Path, stack: ExitStack) -> object:
    """What torch.load would return of a file; it stays open in `stack`.

    Raises:
        FormatError: it is none, is damaged, or would need code of its own to be read; names it.
        FileNotFoundError: there is none.
    """
    path = real(path)
    file = OpenFile(stack.enter_context(opened(path)), path)
    return read_archive(file, 0, file.nbytes, str(path))


def items_in(folder: Path) -> dict[str, Path]:
    """The files of a torch_checkpointing folder of one rank, by what they hold.

    Raises:
        FormatError: two files have the same thing.
        CapabilityError: it is of several ranks.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _ITEM.fullmatch(path.name)
        if match is None:
            continue
        if match[2] != "0":
            raise CapabilityError(
                f"{folder} is of several ranks ({path.name}): how their parts fit together only its writer can say",
                hint="load it with torch_checkpointing, and save it with dcp.save or torch.save",
            )
        if match[1] in found:
            raise FormatError(f"{folder} has {clip(match[1])} twice: {found[match[1]].name} and {path.name}")
        found[match[1]] = path
    return found


def read_torch_checkpointing(folder: Path, stack: ExitStack) -> dict[str, object]:
    """The items that `CheckpointManager.save` was given.

    Raises:
        FormatError: a file is damaged, or would need code of its own to be read; names it.
        CapabilityError: the folder is of several ranks.
    """
    if not folder.is_dir():
        raise FormatError(f"{folder} is no folder of torch_checkpointing: it is no folder at all")
    items = items_in(folder)
    if not items:
        raise FormatError(f"{folder} holds no files as torch_checkpointing names them (model_0.pt)")
    return {name: _item(path, stack) for name, path in items.items()}


def _item(path: Path, stack: ExitStack) -> object:
    if path.suffix == ".safetensors":
        return read_safetensors(path, stack)
    if path.suffix == ".pt":
        return read_torch(path, stack)
    try:
        return msgspec.json.decode(read_file(real(path), _MAX_JSON))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{path} is damaged: {clip(error)}") from None
