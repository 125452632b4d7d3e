"""torch optimizers: state by the names of parameters, options by group, whatever the order and the grouping.

A tensor of the state is stored as `optimizer.<parameter's path>.exp_avg`. A parameter that is in no module has its
place instead: `optimizer[0][3].exp_avg`. What the checkpoint has for a parameter is all that it has afterwards, as
with torch's own `load_state_dict()`; parameters it does not know keep what they have, and are reported.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from zerostall import native
from zerostall.core import names
from zerostall.core.optimizers import Fields, compare
from zerostall.trainer.state import tensors
from zerostall.trainer.state.flat import FlatShard, members_of
from zerostall.trainer.state.parts.optimizer_class import fields_of, fixed_options
from zerostall.trainer.state.parts.optimizer_record import GroupRecord, OptimizerRecord, OptimizerValues, Slots
from zerostall.trainer.state.parts.options import ATOMS, is_lasting, options_of, restore_options
from zerostall.trainer.state.tree import LiveTree
from zerostall.trainer.state.walk import OutdatedError, Signs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from zerostall.trainer.state.aim import Aim, Landing
    from zerostall.trainer.state.walk import Walk


def _is_flat(value: object) -> bool:
    return type(value) in ATOMS or (isinstance(value, torch.Tensor) and tensors.is_plain(value))


class OptimizerPart:
    """An optimizer whose class keeps torch's `state_dict()` and `load_state_dict()`."""

    kind = "optimizer"
    still = False

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        self._labels: dict[int, str] = {}
        self._names: dict[int, list[tuple[str, str]]] = {}
        self._lists: list[object] = []
        self._groups: list[GroupRecord] = []
        self._options: list[LiveTree] = []
        self._lasting: native.Watch | None = None  # the groups, where their options are values that cannot change
        self._latest: OptimizerValues | None = None  # if the groups were all that had to be copied
        self._surveyed: list[dict[str, object]] = []  # these groups
        self._kept: object = None  # the dict of all state, as surveyed
        self._atoms: list[tuple[str, dict[str, object], list[str]]] = []
        self._trees: list[tuple[str, LiveTree, torch.Tensor]] = []
        self._extra = LiveTree(f"{name}[-1]")
        self._has_extra = False
        self._host: list[str] = []
        self._keys: list[str] = []
        self._fields = Fields()
        self._plan: list[tuple[torch.Tensor, Slots]] = []
        self._members: Callable[[Iterable[torch.Tensor]], list[torch.Tensor]] = list
        self._rooms: dict[tuple[int, str], torch.Tensor] = {}
        self._matched: dict[int, str] = {}  # of each parameter its label in the checkpoint
        self._record: OptimizerRecord | None = None

    @property
    def slots(self) -> dict[torch.Tensor, object]:
        """What the optimizer keeps of parameters, by parameter."""
        return self.optimizer.state

    @property
    def acting(self) -> torch.optim.Optimizer:
        """The optimizer whose step changes parameters."""
        return self.optimizer

    def keeps(self, param: torch.Tensor) -> bool:
        """Whether it keeps anything of that parameter in this process."""
        # FSDP's original parameters of which nothing is here have no gradient, and so no state.
        return not isinstance(param, FlatShard) or param.source.numel() > 0

    # Saving -----------------------------------------------------------------------------------------------------

    def gather(self, walk: Walk) -> None:
        optimizer = self.optimizer
        self._groups = []  # the one of before may still be looked at
        for held in (self._lists, self._options, self._atoms, self._trees):
            held.clear()
        self._lasting = self._latest = None
        self._members = partial(members_of, walk.flats)  # not the walk, which knows all parts
        self._name_parameters(walk)
        for key, label in self._labels.items():
            if (whose := walk.owned.get(key)) is not None:
                walk.owned_below[self._path(label)] = whose
        walk.guard(optimizer)
        self._surveyed, self._kept = optimizer.param_groups, self.slots
        walk.watched.append(cast("list[object]", optimizer.param_groups))
        walk.watched.append(cast("dict[object, object]", self.slots))
        for number, group in enumerate(optimizer.param_groups):
            params = group["params"]
            self._lists.append(params)
            walk.watched.append(params)
            self._groups.append(self._group_record(params))
            tree = LiveTree(names.child(self.name, number))
            tree.gather(walk, options_of(group))
            self._options.append(tree)
        host: set[str] = set()
        keys: dict[str, None] = {}
        for param, state in self.slots.items():
            if isinstance(param, torch.Tensor):
                for member in self._members((param,)):
                    self._gather_state(walk, member, state, host)
                if type(state) is dict:
                    keys.update(dict.fromkeys(state))
        self._host = sorted(host)
        self._keys = [key for key in keys if type(key) is str]
        self._fields = fields_of(self.acting, self._keys)
        extra = self._extra_state()
        self._has_extra = bool(extra)
        self._extra.gather(walk, extra)

    def _name_parameters(self, walk: Walk) -> None:
        """Give every parameter its label: its path within its module, or its place where it is in none."""
        self._labels.clear()
        self._names.clear()
        owners: dict[str, set[int]] = {}
        everything = self._members(p for group in self.optimizer.param_groups for p in group["params"])
        everything += self._members(p for p in self.slots if isinstance(p, torch.Tensor))
        for param in everything:
            if tensors.is_flat(param):
                walk.refuse(self.name, f"holds what {tensors.FLAT}")
            self._names[id(param)] = walk.labels.get(id(param), [])
            for _, bare in self._names[id(param)][:1]:
                owners.setdefault(bare, set()).add(id(param))
        for number, group in enumerate(self.optimizer.param_groups):
            for index, param in enumerate(self._members(group["params"])):
                self._labels.setdefault(id(param), f"[{number}][{index}]")
        for key, found in self._names.items():
            if found:
                root, bare = found[0]
                # Two modules of one optimizer may use the same path: then the module's own name tells them apart.
                self._labels[key] = bare if len(owners[bare]) == 1 else f"{root}.{bare}"
            elif key not in self._labels:
                walk.refuse(self.name, "has state for a tensor that is in no group and in no module")
                self._labels[key] = f"[{len(self.optimizer.param_groups)}][{len(self._labels)}]"

    def _group_record(self, held: list[torch.Tensor]) -> GroupRecord:
        params = self._members(held)
        labels = [self._labels[id(param)] for param in params]
        shapes = {
            label: list(param.shape) for label, param in zip(labels, params, strict=True) if label.startswith("[")
        }
        return GroupRecord(labels, shapes, {})

    def _path(self, label: str) -> str:
        return self.name + label if label.startswith("[") else f"{self.name}.{label}"

    def _gather_state(self, walk: Walk, param: torch.Tensor, state: object, host: set[str]) -> None:
        label = self._labels[id(param)]
        path = self._path(label)
        first = len(walk.leaves)
        walk.inheriting = walk.owned.get(id(param))
        if type(state) is dict and all(map(_is_flat, state.values())):
            if not walk.watched or walk.watched[-1] is not state:  # which is that of many where FSDP has made them one
                walk.watched.append(cast("dict[object, object]", state))
            atoms: list[str] = []
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    atoms.append(key)
                    continue
                name, slot = names.child(path, key), _slot(param, value)
                if not walk.ordinary(name, slot):
                    walk.tensor(name, slot)
                if value.is_cpu and not param.is_cpu:
                    host.add(key)
            if atoms:
                self._atoms.append((label, state, atoms))
        elif isinstance(param, FlatShard):
            walk.refuse(path, "is no dict of tensors and numbers, and FSDP has put the parameter into a flat one")
        else:
            tree = LiveTree(path)
            tree.gather(walk, state)
            self._trees.append((label, tree, param))
        walk.inheriting = None
        walk.guarded.update([leaf.owner for leaf in walk.leaves[first:]])

    def _extra_state(self) -> dict[object, object]:
        return {key: value for key, value in self.slots.items() if not isinstance(key, torch.Tensor)}

    def values(self) -> OptimizerValues:
        if self.slots is not self._kept:  # `optimizer.state = defaultdict(dict)`: the watch knows the one of before
            raise OutdatedError(self.name)
        groups = self.optimizer.param_groups
        latest, watch = self._latest, self._lasting
        if latest is not None and watch is not None and groups is self._surveyed and watch.untouched():
            return latest
        if groups is not self._surveyed or self._lasting is None or not self._lasting.same():
            self._compare_groups(groups)
        if lasting := self._lasting is not None:
            self._lasting.renew()
        options = (
            [cast("dict[object, object]", group.copy()) for group in groups] if lasting else self._copy_options(groups)
        )
        state: dict[str, object] = {}
        for label, live, keys in self._atoms:
            state[label] = {key: live[key] for key in keys}
        for label, tree, param in self._trees:
            state[label] = tree.copy(self.slots[param])
        # The survey fits, so the keys are those of gather().
        extra = self._extra.copy(self._extra_state()) if self._has_extra else {}
        values = OptimizerValues(self._groups, options, state, extra, self._keys, self._host, self._fields)
        self._latest = values if lasting and groups is self._surveyed and not (state or extra) else None
        return values

    def signs(self) -> Signs | None:
        """See `Part`."""
        holders = self._holders()
        attributes = native.Watch(holders)  # `load_state_dict` makes other groups and another dict of state
        known = holders[0].get("param_groups") is self._surveyed and holders[-1].get("state") is self._kept
        known = known and self._latest is not None
        return Signs([attributes], [self._lasting]) if known and self._lasting is not None else None

    def _holders(self) -> list[dict[str, object]]:
        """The attributes in which the groups are, first, and those with the state, last."""
        return [self.optimizer.__dict__]

    def _compare_groups(self, groups: list[dict[str, object]]) -> None:
        """Find out whether the options may be copied as they lie there, until they are others."""
        self._lasting = None
        if len(groups) != len(self._lists):
            raise OutdatedError(self.name)
        if any(group["params"] is not params for group, params in zip(groups, self._lists, strict=True)):
            raise OutdatedError(self.name)
        if any(tree.held for tree in self._options) or any(type(group) is not dict for group in groups):
            return
        if all(is_lasting(value) for group in groups for value in options_of(group).values()):
            self._lasting = native.Watch(groups)

    def _copy_options(self, groups: list[dict[str, object]]) -> list[dict[object, object]]:
        trees = zip(self._options, groups, strict=True)
        return [cast("dict[object, object]", tree.copy(options_of(group))) for tree, group in trees]

    # Restoring --------------------------------------------------------------------------------------------------

    def aim(self, aim: Aim) -> None:
        self._plan = []
        self._matched = {}
        self._rooms.clear()
        self._record = None
        stored = aim.whole(self)
        if stored is None:
            return
        record = OptimizerRecord.read(stored)
        slots = record.slots(aim.stored, stored)
        verdict = compare(record.fields, self._fields, record.named_options(), fixed_options(self.acting))
        self._keys = record.keys
        aim.leave(stored)
        for found in slots.values():
            aim.claimed.update(found.tensors.values())
        options = record.options()
        taken: set[str] = set()
        aimed = [self.name] if aim.takes_part(self.name) else []
        for group in self.optimizer.param_groups:
            theirs, merged = None, group
            for param in self._members(group["params"]):
                known = self._stored_label(aim, slots, param, stored.name)
                path = self._path(self._labels[id(param)])
                aim.want_value(path, stored=known is not None)
                aim.want_value(path + ".", stored=True)
                if known is not None:
                    taken.add(known)
                    if not aim.takes_part(path):
                        continue
                    self._matched[id(param)] = known
                    aimed.append(path)
                    if self.keeps(param):
                        if (own := options.get(known)) is not theirs:
                            theirs, merged = own, {**group, **(own or {})}
                        self._aim_parameter(aim, record, slots[known], param, merged)
        for label, found in slots.items():
            if label not in taken:
                path = stored.name + label if label.startswith("[") else f"{stored.name}.{label}"
                aim.unexpected.extend(found.tensors.values() or [path])
        if aimed and not (verdict.fits or (verdict.doubtful and aim.lenient)):
            aim.differs(aimed[0], verdict.reason)
        elif aimed and verdict.reason:
            aim.warnings.append(f"{self.name}: {verdict.reason}")
        if aim.takes_part(self.name):
            self._record = record
            for row in record.groups:
                aim.tree(stored, row.options)
            aim.tree(stored, record.extra)

    def _aim_parameter(
        self, aim: Aim, record: OptimizerRecord, found: Slots, param: torch.Tensor, options: Mapping[str, object]
    ) -> None:
        path = self._path(self._labels[id(param)])
        shape = record.shape(found.label)
        if shape is not None and shape != tuple(param.shape):
            aim.differs(path, f"stored for a parameter of shape {shape}, this one has {tuple(param.shape)}")
            return
        why = None if id(param) in aim.places else tensors.problem(param)  # what the walk has found has passed
        if why is not None:
            aim.differs(path, f"the parameter {why}")
            return
        live = self.slots.get(_held(param), {})
        live = live if isinstance(live, dict) else {}
        for key, name in found.tensors.items():
            device = record.device(key, options, param)
            slot = live.get(key)
            slot = _slot(param, slot) if isinstance(slot, torch.Tensor) else slot
            fits = isinstance(slot, torch.Tensor) and tensors.is_plain(slot) and slot.device == device
            aim.tensor(name, slot if fits else self._room(aim, name, param, key, device))
        for name in found.nested:
            aim.tensor(name, None, param.device)
        self._plan.append((param, found))

    def _room(self, aim: Aim, name: str, param: torch.Tensor, key: str, device: torch.device) -> torch.Tensor:
        dtype = tensors.torch_dtype(aim.stored.dtype(name))
        shape = aim.stored.shape(name)
        if isinstance(param, FlatShard) and shape == tuple(param.shape) and shape:
            # Of all parameters in a flat one, in one tensor, as the optimizer makes it.
            room = (id(param.source), key)
            if room not in self._rooms:
                self._rooms[room] = torch.zeros_like(param.source.detach(), dtype=dtype, device=device)
            return param.of(self._rooms[room])
        if shape == tuple(param.shape) and device == param.device:
            # As torch makes it: with the parameter's memory format.
            return torch.empty_like(param.detach(), dtype=dtype, memory_format=torch.preserve_format)
        return torch.empty(shape, dtype=dtype, device=device)

    def _stored_label(self, aim: Aim, slots: Mapping[str, Slots], param: torch.Tensor, stored_name: str) -> str | None:
        """Find a parameter's label in the checkpoint: by any of its names, renamed, or without wrappers' prefixes."""
        rename = aim.selection.stored_name
        for root, bare in self._names[id(param)]:
            if bare in slots:
                return bare
            candidates = [f"{root}.{bare}", rename(f"{root}.{bare}")]
            outer = rename(root) + "."
            if candidates[-1].startswith(outer):
                candidates.append(candidates[-1][len(outer) :])
            own = rename(f"{self.name}.{bare}")
            if own.startswith(stored_name + "."):
                candidates.append(own[len(stored_name) + 1 :])
            if aim.prefixes:
                candidates.append(names.strip_wrappers(bare, rooted=False))
            for candidate in candidates:
                if candidate in slots:
                    return candidate
        label = self._labels[id(param)]
        return label if label in slots else None

    def accept(self, landing: Landing) -> None:
        state = self.slots
        for param, fresh in self._fresh(landing):
            if not fresh:
                state.pop(param, None)
                continue
            live = state.get(param)
            if type(live) is dict and type(fresh) is dict:
                live.clear()
                live.update(fresh)
            else:
                state[param] = fresh  # type: ignore[assignment]
        if self._record is not None:
            for key, value in cast("dict[torch.Tensor, object]", landing.resolve(self._record.extra)).items():
                state[key] = value
            restore_options(self.optimizer, self._record.groups, self._matched, landing, self.name, self._members)
        self._plan = []
        self._rooms.clear()
        self._record = None

    def _fresh(self, landing: Landing) -> list[tuple[torch.Tensor, object]]:
        """What the optimizer holds, and the state of it, whole again where FSDP has made one of many parameters."""
        found: list[tuple[torch.Tensor, object]] = []
        flats: dict[int, dict[object, object]] = {}
        for param, slots in self._plan:
            fresh = slots.state(landing.resolver, self._keys)
            if not isinstance(param, FlatShard):
                found.append((param, fresh))
                continue
            flat = flats.get(id(param.source))
            if flat is None:
                flat = flats[id(param.source)] = {}
                found.append((param.source, flat))
            for key, value in (cast("dict[object, object]", fresh) or {}).items():
                flat.setdefault(key, value.source if isinstance(value, FlatShard) else value)
        return found


def _held(param: torch.Tensor) -> torch.Tensor:
    """What the optimizer holds for a parameter."""
    return param.source if isinstance(param, FlatShard) else param


def _slot(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What of a tensor of the state is the parameter's."""
    return param.of(value) if isinstance(param, FlatShard) and param.alike(value) else value
