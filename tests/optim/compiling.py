"""Compile what zerostall.optim would launch, for an H200. Run by `test_compiled.py`, without Triton's interpreter."""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from zerostall.optim.batches import Kind
from zerostall.optim.kernels import adam, one_moment, parts
from zerostall.optim.tables import Table

H200 = GPUTarget("cuda", 90, 32)
POINTERS = {torch.int64: "*i64", torch.float32: "*fp32"}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def compile_only(kernel: Any, *arguments: Any, grid: object, warmup: bool, **named: Any) -> None:
    """In place of a launch."""
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **named}
    options = {name: values.pop(name) for name in list(values) if name not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(number,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(number,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=H200, options=options)
    wide = len(re.findall(r"ld\.global(?:\.L1::\w+)*\.v[24]\.b(?:32|64)", compiled.asm["ptx"]))
    print("compiled", kernel.__name__, f"{wide} wide loads,", {str(key[0]): value for key, value in constants.items()})
    if "TILE" in kernel.arg_names:
        assert wide >= 3, "whole tiles are to be read 16 bytes at a time"


def main() -> None:
    JITFunction.run = compile_only
    table, one = Table(torch.device("cpu"), [10_000, 3]), torch.ones(())
    parts.count(table, None)
    parts.count(table, one)
    plain = {"lr": 1e-3, "lr_at": None, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.01, "amsgrad": False}
    plain |= {"maximize": False, "scale": None, "infinite": None}
    everything = plain | {"lr_at": one, "decay": 0.0, "amsgrad": True, "maximize": True, "scale": one, "infinite": one}
    kinds = [(floats, floats, floats) for floats in FLOATS]
    kinds += [(torch.float32, torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16, torch.float32)]
    for types, options in itertools.product(kinds, (plain, everything)):
        adam.adam(table, Kind(torch.device("cpu"), *types), **options)
    plain = {"lr": 1e-3, "lr_at": None, "momentum": 0.9, "dampening": 0.0, "decay": 0.0, "nesterov": False}
    plain |= {"maximize": False, "scale": None, "infinite": None}
    everything = plain | {"lr_at": one, "decay": 0.1, "nesterov": True, "maximize": True, "scale": one, "infinite": one}
    for floats, options in itertools.product(FLOATS[:3], (plain, everything)):
        one_moment.sgd(table, Kind(torch.device("cpu"), floats, floats, floats), **options)
    plain = {"lr": 1e-3, "lr_at": None, "beta1": 0.9, "beta2": 0.99, "decay": 0.0, "maximize": False}
    plain |= {"scale": None, "infinite": None}
    everything = plain | {"lr_at": one, "decay": 0.1, "maximize": True, "scale": one, "infinite": one}
    for floats, options in itertools.product(FLOATS[:3], (plain, everything)):
        one_moment.lion(table, Kind(torch.device("cpu"), floats, floats, floats), **options)


if __name__ == "__main__":
    main()
