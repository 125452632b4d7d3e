"""NaN and infinity are found in every type that can hold them, by name, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from state_trip import save
from zerostall.core.dtypes import DTYPES, NOT_FINITE
from zerostall.native import any_masked
from zerostall.trainer.finite import FiniteCheck

FLOATS = [dtype for name in DTYPES if (dtype := getattr(torch, name, None)) and dtype.is_floating_point]


def has_none(data: torch.Tensor, dtype: str) -> bool:
    width, mask, value = NOT_FINITE[dtype]
    return any_masked(data.data_ptr(), data.nbytes, width=width, mask=mask, value=value)


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in FLOATS if dtype.itemsize <= 2 and "float4" not in str(dtype)], ids=str
)
def test_every_number_of_a_short_type(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    kind = np.uint8 if dtype.itemsize == 1 else np.uint16
    every = torch.from_numpy(np.arange(1 << (8 * dtype.itemsize), dtype=np.uint32).astype(kind)).view(dtype)
    wide = every.to(torch.float32)
    for at in range(0, len(every), 1 if dtype.itemsize == 1 else 61):
        assert has_none(every[at : at + 1], name) == (not torch.isfinite(wide[at])), every[at]
    assert has_none(every, name)
    assert not has_none(every[torch.isfinite(wide)], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_wide_types_wherever_it_stands(dtype: torch.dtype, odd: float) -> None:
    name = str(dtype).removeprefix("torch.")
    limits = torch.finfo(dtype)
    for at in (0, 1, 4095, 4096, 9998, 9999):
        data = torch.full((10_000,), limits.max, dtype=dtype)
        data[0], data[1], data[2] = limits.tiny, -0.0, limits.min
        assert not has_none(data, name)
        data[at] = complex(1, odd) if dtype.is_complex else odd
        assert has_none(data, name)
        assert not has_none(data[at + 1 :], name)


def test_every_type_that_can_hold_one_is_known() -> None:
    complexes = {name for name in DTYPES if "complex" in name}
    without = {"float4_e2m1fn_x2"}
    assert {str(dtype).removeprefix("torch.") for dtype in FLOATS} - without <= set(NOT_FINITE)
    assert set(NOT_FINITE) == {name for name in DTYPES if name.startswith(("float", "bfloat"))} - without | complexes


def test_what_is_no_element_is_refused() -> None:
    for nbytes, width in [(10, 4), (3, 3), (3, 0)]:
        with pytest.raises(ValueError, match="elements"):
            any_masked(torch.zeros(16).data_ptr(), nbytes, width=width, mask=0, value=1)


def test_patterns_choose_and_aliases_count() -> None:
    weight = torch.ones(3000)
    saved = save(
        m={"mask": torch.tensor([float("-inf")]), "w": weight, "tied": weight, "n": torch.ones(3, dtype=torch.int32)}
    )
    image = torch.frombuffer(saved.image, dtype=torch.uint8).data_ptr()
    layout = saved.stored.layout
    assert FiniteCheck(layout, "*").offenders(image) == ["m.mask"]
    assert FiniteCheck(layout, ["*", "!m.mask"]).offenders(image) == []
    weight[2999] = float("nan")
    saved = save(m={"w": weight, "tied": weight})
    image = torch.frombuffer(saved.image, dtype=torch.uint8).data_ptr()
    (entry,) = saved.stored.layout.entries
    for pattern in ("m.w", "m.tied"):
        assert FiniteCheck(saved.stored.layout, pattern).offenders(image) == [entry.name]
    with pytest.raises(ValueError, match=r"require_finite=.* fits no name; names begin with"):
        FiniteCheck(layout, "m.weight")
