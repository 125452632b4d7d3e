"""Other people's files of torch.save, and the folders of torch_checkpointing, which consist of them, rank by rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.quoting import clip
from zerostall.errors import CapabilityError, FormatError
from zerostall.flow.foreign_safetensors import read_safetensors
from zerostall.flow.merged_ranks import Merged
from zerostall.flow.readable import OpenFile
from zerostall.flow.torch_archive import MAGIC, read_archive
from zerostall.tiers.files import opened, read_file, real

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

_ITEM = re.compile(r"(.+)_([0-9]+)\.(pt|json|safetensors)")
_MAX_JSON = 1 << 26
_HEAD = 64
_MAGIC = 0x1950A86A20F9469CFC6C
_MARKS = (b"\x8a\x0a" + _MAGIC.to_bytes(10, "little"), b"L%dL" % _MAGIC, b"I%d" % _MAGIC)
"""How a file of the old way begins: by a pickled number, here as any protocol of pickle writes it."""

_LOOKS: tuple[tuple[Callable[[bytes], bool], str], ...] = (
    (lambda head: head[8:9] == b"{", 'it looks like a safetensors file: say format="safetensors" (--format)'),
    (lambda head: head.lstrip()[:1] == b"{", 'it looks like JSON: for an index of shards say format="huggingface"'),
    (lambda head: head[:4] in (b"PK\x05\x06", b"PK\x07\x08"), "it is a zip archive with nothing in it"),
    (lambda head: head[:1] == b"\x80", "it is a bare pickle: load it yourself and save a plain dict of tensors"),
)


def is_archive(path: Path) -> bool:
    """Whether a file begins as those that torch.save writes since release 1.6."""
    with opened(real(path)) as fd:
        head = bytearray(4)
        file = OpenFile(fd, path)
        if file.nbytes < len(head):
            return False
        file.read_into(memoryview(head), 0)
        return bytes(head) == MAGIC


def insist_on_old_way(path: Path) -> None:
    """Refuse what is no file of torch.save from before release 1.6.

    torch.load reads any file as a pickle, and what it then stumbles over tells nobody what is wrong.

    Raises:
        FormatError: it is none; names it.
    """
    with opened(real(path)) as fd:
        file = OpenFile(fd, path)
        data = bytearray(min(_HEAD, file.nbytes))
        file.read_into(memoryview(data), 0)
    head = bytes(data)
    if any(mark in head for mark in _MARKS):
        return
    if not head:
        raise FormatError(f"{path} is empty")
    raise FormatError(
        f"{path} is no file of torch.save: neither a zip archive nor in the form of before torch 1.6",
        hint=next((hint for looks, hint in _LOOKS if looks(head)), ""),
    )


def read_torch(path: Path, stack: ExitStack, *, parts: bool = False) -> object:
    """What torch.load would return of a file; it stays open in `stack`. `parts` as in `read_archive`.

    Raises:
        FormatError: it is none, is damaged, or would need code of its own to be read; names it.
        FileNotFoundError: there is none.
    """
    path = real(path)
    file = OpenFile(stack.enter_context(opened(path)), path)
    return read_archive(file, 0, file.nbytes, str(path), parts=parts)


def items_in(folder: Path) -> dict[str, dict[int, Path]]:
    """The files of a torch_checkpointing folder, by what they hold and by rank.

    Raises:
        FormatError: two files have the same thing.
    """
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _ITEM.fullmatch(path.name)
        if match is None:
            continue
        ranks = found.setdefault(match[1], {})
        rank = int(match[2])
        if rank in ranks:
            raise FormatError(f"{folder} has {clip(match[1])} twice: {ranks[rank].name} and {path.name}")
        ranks[rank] = path
    return found


def read_torch_checkpointing(folder: Path, stack: ExitStack, only: str | None = None) -> dict[str, object]:
    """The items that `CheckpointManager.save` was given: of several ranks put together again. `only`: that one alone.

    Raises:
        FormatError: a file is damaged, would need code of its own to be read, or ranks contradict each other; names it.
        CapabilityError: an item of several ranks is in files that do not say how their parts fit together.
    """
    if not folder.is_dir():
        raise FormatError(f"{folder} is no folder of torch_checkpointing: it is no folder at all")
    items = items_in(folder)
    if not items:
        raise FormatError(f"{folder} holds no files as torch_checkpointing names them (model_0.pt)")
    if only in items:
        items = {only: items[only]}
    merged = Merged(folder)
    found = {name: merged.item(name, _ranks(name, paths, folder, stack)) for name, paths in items.items()}
    merged.tell()
    return found


def _ranks(name: str, paths: dict[int, Path], folder: Path, stack: ExitStack) -> list[tuple[int, object]]:
    if len(paths) > 1 and any(path.suffix == ".safetensors" for path in paths.values()):
        raise CapabilityError(
            f"{folder} has {clip(name)} of several ranks in safetensors files, which do not say how they fit together",
            hint="load it with torch_checkpointing, and save it with dcp.save or torch.save",
        )
    return [(rank, _item(path, stack)) for rank, path in sorted(paths.items())]


def _item(path: Path, stack: ExitStack) -> object:
    if path.suffix == ".safetensors":
        return read_safetensors(path, stack)
    if path.suffix == ".pt":
        return read_torch(path, stack, parts=True)
    try:
        return msgspec.json.decode(read_file(real(path), _MAX_JSON))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{path} is damaged: {clip(error)}") from None
