"""Modules: their parameters and persistent buffers under canonical names, whatever they are wrapped in.

Tensors are taken from the modules themselves and restored in place, for what is registered is the whole state of an
ordinary module. A submodule that changes what `state_dict()` gives (an override, a hook) is asked through
`state_dict()` and `load_state_dict()` instead, that submodule alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from zerostall.core import names
from zerostall.trainer.state import flat, tensors
from zerostall.trainer.state.parts.hooking import hooks_of
from zerostall.trainer.state.parts.stateful import StatefulPart
from zerostall.trainer.state.walk import OutdatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerostall.trainer.state.aim import Aim, Landing
    from zerostall.trainer.state.refs import Ref
    from zerostall.trainer.state.walk import Walk

_log = logging.getLogger(__name__)
_told: set[type] = set()

# (module, class) of what is put around a module -> the attribute that holds it. By name: importing them is slow.
_WRAPPERS: dict[tuple[str, str], str] = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
}


def wrapped_as(module: nn.Module) -> str | None:
    """Return the attribute in which one of torch's wrappers holds its module, None for any other module.

    Told by type: a real child called `module` is no wrapper's.
    """
    return _wraps(type(module))


@functools.lru_cache(maxsize=1024)  # some programs make a class for each module
def _wraps(kind: type) -> str | None:
    for base in kind.__mro__:
        attribute = _WRAPPERS.get((base.__module__, base.__name__))
        if attribute is not None:
            return attribute
    return None


class ModulePart:
    """A module and all below it."""

    kind = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self._composites: dict[str, Ref] = {}
        self._own: list[str] = []
        self._post_hooks: list[tuple[Callable[..., object], nn.Module]] = []
        self._left_out: list[str] = []
        self._frozen: list[torch.Tensor] = []
        self._flats: dict[int, dict[str, torch.Tensor]] = {}  # of a module what FSDP has put into a flat parameter
        self._flat_ones: set[int] = set()

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors that were found in the module itself."""
        return self._own

    @property
    def still(self) -> bool:
        return not self._frozen

    def gather(self, walk: Walk) -> None:
        self._composites.clear()
        self._own.clear()
        self._post_hooks.clear()
        self._left_out.clear()
        self._frozen.clear()
        self._flats.clear()
        self._flat_ones.clear()
        self._descend(walk, self.module, self.name, direct=True)

    def _descend(self, walk: Walk, module: nn.Module, name: str, *, direct: bool) -> None:
        leading = walk.leading
        while (attribute := wrapped_as(module)) is not None:
            # Its buffers are the first rank's at the next forward, whatever the others have now.
            walk.leading = walk.leading or bool(getattr(module, "broadcast_buffers", False))
            # What the wrapper holds decides all the rest, so that is watched too.
            walk.watched.append(cast("dict[object, object]", module._modules))
            if attribute == "_fsdp_wrapped_module":
                self._unflatten(walk, module, name)
            module = cast("nn.Module", module._modules[attribute])
        for hook in module._state_dict_pre_hooks.values():
            if _is_fsdp(hook):
                hook(module, "", True)  # between passes FSDP may have whole parameters in the place of the sharded ones
        for key, parameter in self._parameters(module).items():
            if parameter is not None:
                below = names.child(name, key)[len(self.name) + 1 :]
                walk.labels.setdefault(id(parameter), []).append((self.name, below))
        if direct:
            walk.hooks += hooks_of(module)
            walk.kinds.add(type(module))
            special = changes_state_dict(module)
            if special:
                self._tell(module, special)
                if any(id(inner) in self._flats for inner in module.modules()):
                    walk.refuse(name, f"{special}, and FSDP has put parameters of it into a flat one")
                walk.add(module_through_state_dict(name, module))
                direct = False
            else:
                self._take(walk, module, name)
        for key, child in module._modules.items():
            if child is not None:
                self._descend(walk, child, names.child(name, key), direct=direct)
        walk.leading = leading

    def _unflatten(self, walk: Walk, wrapper: nn.Module, name: str) -> None:
        """Find the parameters that FSDP's first version has laid one behind the other."""
        try:
            for module, key, held, shard in flat.shards(wrapper):
                self._flats.setdefault(id(module), {})[key] = shard
                self._flat_ones.add(id(held))
                members = walk.flats.setdefault(id(held), [])
                if not any(shard is member for member in members):
                    members.append(shard)
        except flat.UnfitError as error:
            walk.refuse(name, str(error))

    def _parameters(self, module: nn.Module) -> Mapping[str, torch.Tensor | None]:
        """The parameters of a module, whether or not it is FSDP that has them."""
        flattened = self._flats.get(id(module), {})
        if not flattened and flat.FLAT_PARAMETER not in module._parameters:
            return module._parameters
        own = {key: p for key, p in module._parameters.items() if id(p) not in self._flat_ones}
        return {**own, **flattened}

    def _take(self, walk: Walk, module: nn.Module, name: str) -> None:
        watched = walk.watched
        for held in (module._parameters, module._buffers, module._modules):
            watched.append(cast("dict[object, object]", held))
        transient = module._non_persistent_buffers_set
        if module._buffers:
            watched.append(transient)
        leading = walk.leading
        for held in (self._parameters(module), module._buffers):
            walk.leading = leading and held is module._buffers
            for key, tensor in held.items():
                if tensor is None:
                    continue
                full = names.child(name, key)
                if key in transient and held is module._buffers:
                    if tensor.is_meta:
                        self._left_out.append(full)
                    continue
                frozen = held is not module._buffers and not tensor.requires_grad
                if not self._chosen(walk, full, tensor, frozen=frozen):
                    walk.left_out.append((full, tensor))
                    continue
                if walk.ordinary(full, tensor):
                    self._own.append(full)
                    continue
                first = len(walk.leaves)
                ref = walk.tensor(full, tensor)
                self._own.extend(leaf.name for leaf in walk.leaves[first:])
                if ref is not None and not tensors.is_plain(tensor):
                    self._composites[full] = ref
        walk.leading = leading
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            walk.add(StatefulPart(names.child(name, "_extra_state"), module.get_extra_state, module.set_extra_state))
        self._post_hooks.extend((hook, module) for hook in module._load_state_dict_post_hooks.values())

    def _chosen(self, walk: Walk, name: str, tensor: torch.Tensor, *, frozen: bool) -> bool:
        if not walk.takes(name):
            return False
        if not frozen or walk.choice.frozen:
            return True
        self._frozen.append(tensor.source if isinstance(tensor, flat.FlatShard) else tensor)
        return False

    def _tell(self, module: nn.Module, why: str) -> None:
        if type(module) not in _told:
            _told.add(type(module))
            _log.info("%s %s, so its state goes through its own state_dict()", type(module).__qualname__, why)

    def values(self) -> object:
        if any(tensor.requires_grad for tensor in self._frozen):
            raise OutdatedError(self.name)  # what is trained now is saved from now on
        return {"composites": dict(self._composites)} if self._composites else {}

    def signs(self) -> None:
        return None

    def aim(self, aim: Aim) -> None:
        for name in self._own:
            aim.want(name)
        aim.composites(self, self._composites)
        if self._left_out:
            aim.warnings.append("still on the meta device, for they are never saved: " + ", ".join(self._left_out))

    def accept(self, landing: Landing) -> None:
        for hook, module in self._post_hooks:
            hook(module, torch.nn.modules.module._IncompatibleKeys([], []))


def changes_state_dict(module: nn.Module) -> str:
    """Say in words what makes `state_dict()` of this module differ from what is registered, or return ''."""
    kind = type(module)
    if kind.state_dict is not nn.Module.state_dict:
        return "overrides state_dict"
    if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
        return "overrides _save_to_state_dict"
    if any(_foreign(hook) for hook in module._state_dict_hooks.values()):
        return "has state_dict hooks"
    if any(_foreign(hook) for hook in module._state_dict_pre_hooks.values()):
        return "has state_dict pre-hooks"
    return ""


def _foreign(hook: Callable[..., object]) -> bool:
    # Hooks of torch's own wrappers only strip the prefixes that unwrap() knows of.
    return not (_is_fsdp(hook) or _module_of(hook).startswith("torch.distributed.algorithms._checkpoint."))


def _is_fsdp(hook: Callable[..., object]) -> bool:
    return _module_of(hook).startswith("torch.distributed.fsdp._fully_shard.")


def _module_of(hook: Callable[..., object]) -> str:
    return getattr(getattr(hook, "hook", hook), "__module__", None) or ""


def module_through_state_dict(name: str, module: nn.Module) -> StatefulPart:
    """Return the part for a module that says itself what its state is."""
    parameters = inspect.signature(module.state_dict).parameters.values()
    # With keep_vars the very parameters come, not detached copies that are new objects at every look.
    keeps = any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def get() -> object:
        with torch.no_grad():
            return dict(module.state_dict(keep_vars=True) if keeps else module.state_dict())

    def put(tree: object) -> None:
        state = OrderedDict(cast("dict[str, object]", tree))
        current = module.state_dict()
        if hasattr(current, "_metadata"):
            state._metadata = current._metadata  # type: ignore[attr-defined]
        module.load_state_dict(state)

    return StatefulPart(name, get, put, kind="module state", dotted=True)
