"""What imports and exports need of torch: elements of one type as another, and what its types are called.

Floating point is rounded to the nearest number, ties to even.
"""

from __future__ import annotations

import torch

from zerostall.core.inert import Global, Made
from zerostall.errors import FormatError
from zerostall.trainer.state import refs as refs  # teaches the small values torch's types
from zerostall.trainer.state import tensors


def convert(source: memoryview, target: memoryview, source_type: str, target_type: str) -> None:
    """Fill `target` with the elements of `source`. Any thread."""
    if not len(source):
        return
    into = torch.frombuffer(target, dtype=tensors.torch_dtype(target_type))
    into.copy_(torch.frombuffer(source, dtype=tensors.torch_dtype(source_type)))


def inert(value: Made | Global) -> object:
    """What an inert data type or device of torch stands for."""
    module, name = value.name
    if module == "torch" and isinstance(value, Global):
        return tensors.torch_dtype(name)
    if value.name == ("torch", "device") and isinstance(value, Made):
        kind, *number = value.args
        if type(kind) is str and all(type(index) is int for index in number) and len(number) < 2:
            try:
                return torch.device(f"{kind}:{number[0]}" if number else kind)
            except RuntimeError as error:
                raise FormatError(str(error).splitlines()[0]) from None
    raise FormatError(f"{module}.{name} stands where a value belongs")
