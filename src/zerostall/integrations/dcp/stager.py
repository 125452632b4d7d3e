"""An AsyncStager: the state is copied to host memory by the capture engine while training goes on."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from zerostall import native
from zerostall.core.layout import CHUNK
from zerostall.errors import CapabilityError
from zerostall.trainer.devices import Devices, Straightened
from zerostall.trainer.exchange.rank_image import copy_pool

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALIGN = 64
_PAGE = 4096


class Stager(AsyncStager):
    """Copies the tensors of a state dict to host memory on threads of its own, from any device.

    `stage` returns at once, with what optimizers do not guard already copied; its future is done when all is. Until
    then nothing may change the parameters and states of the optimizers. Given those optimizers, the stager sees to that
    itself: before each `step()` it waits for what is left, and copies along. Else wait for `staging_completion`, as
    with DCP's own stagers.

    Args:
        optimizers: those whose parameters and states are in the state dict.
    """

    _synchronize_after_execute = False

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._pool = copy_pool()
        self._devices = Devices()
        self._thread = ThreadPoolExecutor(1, "zerostall-stage")
        self._running: native.Capture | None = None
        self._last: Future[dict[str, Any]] | None = None
        self._optimizers = optimizers
        before_step = torch.compiler.disable(lambda *_: self._protect())
        self._hooks = [
            optimizer.register_step_pre_hook(before_step)  # pyright: ignore[reportArgumentType]
            for optimizer in optimizers
        ]

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Begin to copy a state; the future gives the same dicts with the copies in place of its tensors."""
        self.synchronize_staging()
        take = _Take()
        tree = take.tree(state_dict)
        offsets: list[int] = []
        at = 0
        for tensor in take.tensors:
            offsets.append(at)
            at = -(-(at + tensor.nbytes) // _ALIGN) * _ALIGN
        segment = native.Segment("zerostall-stage", max(_PAGE, -(-at // _PAGE) * _PAGE), populate=False)
        straightened = Straightened(take.tensors)
        sources = native.Tensors(straightened.tensors, [False] * len(straightened.tensors))
        sources.refresh()
        self._devices.see(sources.devices)
        straightened.fill()
        plan = native.Plan(
            nbytes=segment.nbytes,
            header=b"",
            chunk_bytes=CHUNK,
            offsets=offsets,
            sizes=[tensor.nbytes for tensor in take.tensors],
        )
        capture = native.Capture(
            self._pool,
            plan,
            sources,
            segment.address,
            at_once=self._unguarded(take.tensors),
            streams=self._devices.now(),
        )
        self._running = capture

        def finish() -> dict[str, Any]:
            capture.wait(None)
            whole = torch.frombuffer(segment.view(0, segment.nbytes), dtype=torch.uint8)
            copies = [_copy_of(tensor, whole, offset) for tensor, offset in zip(take.tensors, offsets, strict=True)]
            return cast("dict[str, Any]", tree.filled(copies))

        self._last = self._thread.submit(finish)
        return self._last

    def synchronize_staging(self) -> None:
        """Wait until the last state is copied."""
        if self._last is not None:
            self._last.result()
        self._running = None

    def close(self) -> None:
        """End the threads, and no longer watch over the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._thread.shutdown(wait=True)
        self._running = None
        self._devices.close()
        self._pool.close()

    def _protect(self) -> None:
        """Before an optimizer's step: return when nothing is left to read, or when its stream waits for that."""
        if self._running is not None:
            self._running.protect(streams=self._devices.now())

    def _unguarded(self, tensors: list[torch.Tensor]) -> list[int]:
        """Those that something else than an optimizer may change, where optimizers are known."""
        if not self._optimizers:
            return []
        guarded: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                guarded |= {_storage(param) for param in group["params"]}
            for slot in optimizer.state.values():
                guarded |= {_storage(item) for item in slot.values() if isinstance(item, torch.Tensor)}
        return [index for index, tensor in enumerate(tensors) if _storage(tensor) not in guarded]


def _storage(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage().data_ptr()


def _copy_of(tensor: torch.Tensor, whole: torch.Tensor, offset: int) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return whole[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor; `spec` is that of the DTensor of which it is a rank's part."""

    index: int
    spec: Any = None


@dataclass(slots=True)
class _Tree:
    root: object

    def filled(self, copies: list[torch.Tensor]) -> object:
        return _filled(self.root, copies)


@dataclass(slots=True)
class _Take:
    """Goes through a state dict: tensors are taken down, values copied."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    _seen: dict[tuple[object, ...], int] = field(default_factory=dict)

    def tree(self, state: Mapping[str, Any]) -> _Tree:
        return _Tree(self._take(state, ()))

    def _take(self, value: Any, path: tuple[object, ...]) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            made = type(value)() if type(value) is not dict and not hasattr(value, "default_factory") else {}
            for key, item in value.items():
                made[key] = self._take(item, (*path, key))
            return made
        if type(value) in (list, tuple):
            items = [self._take(item, (*path, number)) for number, item in enumerate(value)]
            return items if type(value) is list else tuple(items)
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor, path: tuple[object, ...]) -> _Slot:
        spec = getattr(tensor, "_spec", None)
        local = cast("torch.Tensor", getattr(tensor, "_local_tensor", tensor)).detach()
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
            name = ".".join(map(str, path))
            raise CapabilityError(f"{name}: a {type(tensor).__name__} of {tensor.layout} cannot be staged")
        # Tied tensors are copied once, and are tied in the copy.
        same = (local.data_ptr(), local.dtype, local.shape, local.stride(), local.device)
        index = self._seen.get(same) if local.numel() else None
        if index is None:
            index = self._seen[same] = len(self.tensors)
            self.tensors.append(local)
        return _Slot(index, spec)


def _filled(value: object, copies: list[torch.Tensor]) -> object:
    if isinstance(value, _Slot):
        if value.spec is None:
            return copies[value.index]
        from torch.distributed.tensor import DTensor

        return DTensor(copies[value.index], value.spec, requires_grad=False)  # pyright: ignore[reportAbstractUsage]
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _filled(item, copies)
        return value
    if type(value) in (list, tuple):
        items = [_filled(item, copies) for item in cast("list[object]", value)]
        return items if type(value) is list else tuple(items)
    return value
