"""Every kind of tensor: types, shapes, strides, aliases, subclasses, and those that are refused."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from state_trip import aliases, bits, load, names, restore, same, save
from zerostall.core.dtypes import DTYPES
from zerostall.errors import MismatchError, StateError
from zerostall.trainer.state import State

TYPES = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        raw = tensor.view(-1).view(torch.uint8)
        high = 2 if dtype is torch.bool else 256
        raw.copy_(torch.randint(0, high, raw.shape, dtype=torch.uint8))
    return tensor


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.filterwarnings("ignore:BComplex32 support")
@pytest.mark.parametrize("name", TYPES)
def test_every_type_keeps_its_bits(name: str) -> None:
    torch.manual_seed(3)
    dtype = getattr(torch, name)
    for shape in [(), (0,), (1,), (7,), (3, 0, 2), (5, 3)]:
        tree = {"t": random_bits(shape, dtype), "pad": torch.rand(1)}
        saved = save(s=tree)
        loaded = load(saved)["s"]["t"]
        assert (loaded.dtype, loaded.shape) == (dtype, torch.Size(shape))
        assert torch.equal(bits(loaded), bits(tree["t"]))
        target = {"t": torch.empty(shape, dtype=dtype), "pad": torch.zeros(1)}
        restore(saved, s=target)
        assert torch.equal(bits(target["t"]), bits(tree["t"]))


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.filterwarnings("ignore:BComplex32 support")
def test_all_torch_types_are_stored_or_refused_by_name() -> None:
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in known - {getattr(torch, name) for name in TYPES}:
        try:
            tensor = torch.empty(2, dtype=dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        with pytest.raises(StateError, match=r"s\.t"):
            save(s={"t": tensor})


def test_views_store_what_is_visible() -> None:
    big = torch.rand(1 << 16)
    tree = {
        "v": big[:10],
        "n": [big[i * 1000 : (i + 1) * 1000] for i in range(5)],
        "s": big[:: 1 << 12],
        "x": torch.rand(1).expand(1 << 14),
        "y": torch.rand(3, 1, 2).expand(3, 50, 2),
    }
    saved = save(s=tree)
    assert saved.stored.layout.nbytes < 4096 + 4 * (10 + 5000 + 16 + 1 + 6) + 64
    assert same(load(saved)["s"], tree)


def test_ties_are_stored_once_and_come_back_tied_or_not_as_the_target_is() -> None:
    weight = torch.rand(30, 20)
    tree = {"emb": weight, "head": weight, "part": weight[:10], "t": weight.t(), "bytes": weight.view(torch.int32)}
    saved = save(s=tree)
    assert sum(entry.nbytes for entry in saved.stored.layout.entries) == weight.nbytes
    assert len(aliases(saved)) == 4
    loaded = load(saved)["s"]
    assert same(loaded, tree)
    assert loaded["emb"].data_ptr() == loaded["head"].data_ptr() == loaded["t"].data_ptr()
    untied = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in tree.items()}
    restore(saved, s=untied)
    assert same(untied, tree)
    again = torch.zeros(30, 20)
    tied = {"emb": again, "head": again, "part": again[:10], "t": again.t(), "bytes": again.view(torch.int32)}
    restore(saved, s=tied)
    assert same(tied, tree)
    only_part = {"part": torch.zeros(10, 20), "t": torch.zeros(20, 30)}
    restore(saved, options={"strict": False}, s=only_part)
    assert same(only_part, {"part": tree["part"], "t": tree["t"].contiguous()})
    tree["head"] = weight.clone()
    untied_save = save(s=tree)
    tree["head"].add_(1)
    loaded = load(save(s=tree))["s"]
    assert not same(loaded["head"], loaded["emb"])
    # Stored apart, tied here: the same bytes are fine, others are told.
    report = restore(untied_save, s=tied)
    assert report.warnings == ()
    report = restore(save(s=tree), s=tied)
    assert len(report.warnings) == 1 and "shares" in report.warnings[0]


def test_a_tied_model_into_an_untied_one_and_back() -> None:
    def model(tie: bool) -> nn.Module:
        made = nn.ModuleDict({"emb": nn.Embedding(50, 30), "head": nn.Linear(30, 50, bias=False)})
        if tie:
            made["head"].weight = made["emb"].weight
        return made

    tied = model(True)
    saved = save(m=tied, o=torch.optim.SGD(tied.parameters()))
    assert aliases(saved) == {"m.head.weight": "m.emb.weight"}
    untied = model(False)
    restore(saved, options={"only": "m.*"}, m=untied)
    assert torch.equal(untied["head"].weight, tied["emb"].weight)
    assert untied["head"].weight.data_ptr() != untied["emb"].weight.data_ptr()
    target = model(True)
    assert not restore(save(m=untied), m=target).warnings
    assert torch.equal(target["head"].weight, tied["emb"].weight)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(range(3), repeat=2)))
def test_values_survive_any_mix_of_strides(source: int, target: int) -> None:
    formats = [
        lambda t: t.contiguous(),
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    ]
    values = torch.arange(2 * 3 * 4 * 5).float().view(2, 3, 4, 5)
    into = formats[target](torch.zeros_like(values))
    strides = into.stride()
    restore(save(x=formats[source](values)), x=into)
    assert torch.equal(into, values)
    assert into.stride() == strides


def test_empty_and_scalar_tensors() -> None:
    tree = {
        "a": torch.empty(0),
        "b": torch.empty(0),
        "c": torch.empty(3, 0),
        "d": torch.tensor(1.5),
        "e": torch.tensor([1.5]),
        "f": torch.empty(0, dtype=torch.bool),
    }
    saved = save(s=tree)
    assert not aliases(saved)
    loaded = load(saved)["s"]
    assert {k: (v.shape, v.dtype) for k, v in loaded.items()} == {k: (v.shape, v.dtype) for k, v in tree.items()}
    target = {key: torch.zeros_like(value) for key, value in tree.items()}
    restore(saved, s=target)
    assert same(target, tree)
    for stored, other in [
        (torch.tensor([1.0, 2.0]), torch.tensor(0.0)),
        (torch.tensor(1.0), torch.zeros(1)),
        (torch.zeros(3, 0), torch.zeros(0, 3)),
        (torch.empty(0), torch.zeros(8, 8)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    ]:
        with pytest.raises(MismatchError) as caught:
            restore(save(x=stored), x=other)
        assert "x" in caught.value.different


def test_an_empty_state_is_legal() -> None:
    saved = save()
    assert load(saved) == {}
    assert restore(saved).tensors == 0
    saved = save(s={})
    assert load(saved) == {"s": {}}
    restore(saved, s={})


def test_expanded_targets() -> None:
    saved = save(x=torch.arange(4.0), y=torch.rand(1).expand(8))
    with pytest.raises(MismatchError) as caught:
        restore(saved, x=torch.zeros(1).expand(4), y=torch.zeros(8))
    assert "x" in caught.value.different and "expanded" in str(caught.value)
    target = torch.zeros(1).expand(8)
    restore(saved, x=torch.zeros(4), y=target)
    assert torch.equal(target, load(saved)["y"])
    plain = torch.zeros(8)
    restore(saved, x=torch.zeros(4), y=plain)
    assert torch.equal(target, plain)
    with pytest.raises(MismatchError):
        restore(save(x=torch.zeros(4), y=torch.zeros(8)), x=torch.zeros(4), y=target)


def test_targets_that_overlap_in_part_are_written_one_after_the_other() -> None:
    saved = save(a=torch.arange(6.0).view(3, 2), b=torch.arange(10.0, 16.0).view(3, 2), c=torch.full((3,), 7.0))
    table = torch.zeros(3, 4)
    window = torch.zeros(3)
    restore(saved, a=table[:, :2], b=table[:, 2:], c=window)
    assert torch.equal(table[:, :2], torch.arange(6.0).view(3, 2))
    assert torch.equal(table[:, 2:], torch.arange(10.0, 16.0).view(3, 2))


class Pair(torch.Tensor):
    """A wrapper without data of its own that follows the flatten protocol."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor, block: int) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor, scale: torch.Tensor, block: int) -> None:
        self.inner, self.scale, self.block = inner, scale, block

    def __tensor_flatten__(self) -> tuple[list[str], dict]:
        return ["inner", "scale"], {"block": self.block}

    @staticmethod
    def __tensor_unflatten__(inner: dict, context: dict, size: object, stride: object) -> Pair:
        return Pair(inner["inner"], inner["scale"], context["block"])

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


class Opaque(torch.Tensor):
    """A wrapper that says nothing of what it holds."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
        raise NotImplementedError(str(func))


def pair(block: int = 16, fill: int | None = None) -> Pair:
    inner = torch.randint(-9, 9, (1000,), dtype=torch.int8) if fill is None else torch.full((1000,), fill).char()
    return Pair(inner, torch.tensor(0.5 if fill is None else 0.0), block)


def test_a_subclass_is_stored_by_its_parts_or_refused() -> None:
    source, target = pair(), pair(fill=0)
    saved = save(s={"x": source})
    assert names(saved) == {"s.x.inner", "s.x.scale"}
    inner = target.inner
    tree = {"x": target}
    restore(saved, s=tree)
    assert tree["x"] is target and target.inner is inner
    assert torch.equal(target.inner, source.inner) and torch.equal(target.scale, source.scale)
    with pytest.raises(MismatchError) as caught:
        restore(saved, s={"x": pair(block=32, fill=0)})
    assert "s.x" in caught.value.different
    with pytest.raises(StateError) as refused:
        save(s={"x": Opaque(torch.rand(3))})
    assert "s.x" in str(refused.value) and "Opaque" in str(refused.value)


def test_a_subclass_as_parameter_and_in_what_has_a_state_dict() -> None:
    def module(wrapped: Pair) -> nn.Module:
        made = nn.Module()
        made.w = nn.Parameter(wrapped, requires_grad=False)
        return made

    class Holder:
        def __init__(self, held: Pair) -> None:
            self.held = held

        def state_dict(self) -> dict:
            return {"held": self.held}

        def load_state_dict(self, state: dict) -> None:
            self.held = state["held"]

    source, target = pair(), pair(fill=0)
    other = Holder(pair(fill=0))
    one = Holder(pair())
    restore(save(m=module(source), h=one), m=module(target), h=other)
    assert torch.equal(target.inner, source.inner)
    assert type(other.held) is Pair and torch.equal(other.held.inner, one.held.inner)
    with pytest.raises(MismatchError) as caught:
        restore(save(m=module(source), h=one), m=module(pair(block=8, fill=0)), h=other)
    assert "m.w" in caught.value.different


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:Lazy modules")
def test_all_that_cannot_be_stored_is_named_at_once() -> None:
    placeholder = nn.Parameter(torch.empty(0))
    placeholder.ds_shape = (8, 8)
    freed = torch.rand(4)
    freed.untyped_storage().resize_(0)
    bad = {
        "sparse": torch.rand(3, 3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "lazy": nn.LazyLinear(3).weight,
        "conj": torch.rand(2, dtype=torch.complex64).conj(),
        "placeholder": placeholder,
        "freed": freed,
        "objects": np.array([object()], dtype=object),
        "reversed": np.arange(4)[::-1],
        "thing": object(),
        "deep": {"list": [1, {"thing": lambda: 0}]},
        "class": nn.Linear,
    }
    with pytest.raises(StateError) as caught:
        State({"s": bad, "fine": {"a": 1}, "tuple": (1, 2), "number": 3}, rng=False).survey()
    text = str(caught.value)
    wanted = [f"s.{key}" for key in bad if key != "deep"] + ["s.deep.list[1].thing", "tuple", "number"]
    assert [name for name in wanted if name not in text] == []
    assert "(8, 8)" in text and "fine" not in text
    loop: dict = {}
    loop["self"] = loop
    with pytest.raises(StateError, match=r"s\.self"):
        save(s=loop)


def test_meta_modules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1 = nn.Linear(3, 4)
            self.register_buffer("freqs", torch.ones(3), persistent=False)

    saved = save(m=Net())
    with torch.device("meta"):
        meta = Net()
    with pytest.raises(MismatchError) as caught:
        restore(saved, m=meta)
    assert "m.l1.weight" in str(caught.value) and "to_empty" in caught.value.hint
    with pytest.raises(StateError, match=r"m\.l1\.weight"):
        save(m=meta)
    meta.l1.to_empty(device="cpu")
    report = restore(saved, m=meta)
    assert any("m.freqs" in warning for warning in report.warnings)


def test_numpy_arrays() -> None:
    tree = {
        "f": np.arange(6.0).reshape(2, 3),
        "cols": np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:3],
        "z": np.array(3, dtype=np.uint16),
        "c": np.array([1 + 2j], dtype=np.complex64),
        "b": np.array([True, False]),
        "h": np.array([1.5], dtype=np.float16),
        "day": np.array(["2024-05-01"], dtype="datetime64[D]"),
        "words": np.array(["a", "bcd"]),
    }
    saved = save(s=tree)
    assert same(load(saved)["s"], {key: value.copy() for key, value in tree.items()})
    target = {key: np.zeros_like(value) for key, value in tree.items()}
    held = target["f"]
    frozen = target["b"]
    frozen.flags.writeable = False
    restore(saved, s=target)
    assert same(target, {key: value.copy() for key, value in tree.items()})
    assert target["f"] is held
    assert not frozen.any(), "a read-only array is replaced, not written"
    shared = np.arange(10.0)
    assert aliases(save(s={"all": shared, "some": shared[2:5]})) == {"s.some": "s.all"}


def test_names_that_need_escapes_exist_side_by_side() -> None:
    keys: list[object] = ["", "a.b", "a/b", "a\\.b", ".", "..", "0", 0, -1, "é\n", "val/loss=0.1", (1, "x"), None, True]
    tree = {key: torch.tensor(float(index)) for index, key in enumerate(keys)}
    tree["a"] = {"b": torch.tensor(99.0), "": torch.tensor(98.0)}
    saved = save(s=tree)
    assert same(load(saved)["s"], tree)
    target = {key: torch.zeros(()) for key in keys}
    target["a"] = {"b": torch.zeros(()), "": torch.zeros(())}
    restore(saved, s=target)
    assert same(target, tree)


def test_random_windows_of_one_buffer() -> None:
    source = random.Random(5)
    for _ in range(40):
        buffer = torch.randint(0, 255, (120,), dtype=torch.uint8)
        other = torch.zeros(120, dtype=torch.uint8)
        tree, twin = {}, {}
        for index in range(source.randint(1, 8)):
            start = source.randrange(0, 100)
            length = source.randrange(1, 120 - start)
            step = source.choice([1, 1, 1, 2, 3])
            tree[f"w{index}"] = buffer[start : start + length : step]
            twin[f"w{index}"] = other[start : start + length : step]
        apart = {key: torch.zeros_like(value) for key, value in tree.items()}
        saved = save(s=tree)
        assert same(load(saved)["s"], tree)
        restore(saved, s=apart)
        assert same(apart, tree)
        assert not restore(saved, s=twin).warnings
        assert same(twin, tree)
