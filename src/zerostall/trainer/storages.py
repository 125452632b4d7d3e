"""What gives a storage other memory in place, or none: it waits until no snapshot reads the old any more.

`share_memory_`, pickling for another process and `resize_` do that, and whoever holds the storage does not hold its
memory. These methods of torch are therefore wrapped while there are checkpointers; a call costs 1 µs more then.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_EXCHANGING = {
    torch.UntypedStorage: ("_share_fd_cpu_", "_share_filename_cpu_", "resize_"),  # all others come to one of these
    torch.Tensor: ("resize_", "resize_as_"),
}


class Reader(Protocol):
    """Somebody who reads memory in the background."""

    def busy(self) -> bool:
        """Whether anything is being read at all."""
        ...

    def let_exchange(self, storage: torch.UntypedStorage) -> None:
        """Return when nothing of that storage's memory is read any more. Any thread."""
        ...


def ask(reader: Reader) -> None:
    """Ask it from now on, until `forget`, or until it is no more: it is not kept alive."""
    key = id(reader)
    with _lock:
        _readers[key] = weakref.ref(reader, lambda _: _forget(key))
        if not _wrapped:
            _wrap()


def forget(reader: Reader) -> None:
    _forget(id(reader))


_lock = threading.RLock()  # a reader may be collected at any allocation
_readers: dict[int, weakref.ref[Reader]] = {}
_wrapped: list[tuple[type, str, object, object]] = []


def _forget(key: int) -> None:
    with _lock:
        _readers.pop(key, None)
        if not _readers:
            _unwrap()


def _wrap() -> None:
    for kind, names in _EXCHANGING.items():
        for name in names:
            before = vars(kind).get(name)
            wrapper = _waiting(getattr(kind, name))
            setattr(kind, name, wrapper)
            _wrapped.append((kind, name, before, wrapper))


def _unwrap() -> None:
    """What somebody else has wrapped meanwhile stays: without readers it only passes on."""
    for kind, name, before, wrapper in _wrapped:
        if vars(kind).get(name) is not wrapper:
            continue
        if before is None:
            delattr(kind, name)  # it was inherited
        else:
            setattr(kind, name, before)
    _wrapped.clear()


def _waiting(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def wait_and_exchange(owner: torch.Tensor | torch.UntypedStorage, *args: object, **kwargs: object) -> object:
        for reference in tuple(_readers.values()):
            if (reader := reference()) is not None and reader.busy() and (storage := _storage(owner)) is not None:
                reader.let_exchange(storage)
        return original(owner, *args, **kwargs)

    return wait_and_exchange


def _storage(owner: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage | None:
    """None for what has no memory of its own, like a sparse or a traced tensor."""
    if isinstance(owner, torch.Tensor):
        try:
            owner = owner.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
    return owner if owner.device.type in ("cpu", "cuda") else None
