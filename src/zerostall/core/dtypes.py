"""The data types of tensors: how torch calls them, how large they are, how safetensors writes them.

A file may only carry type codes that every safetensors reader knows (those of its release 0.4), or a file
with one odd tensor could not be opened at all. A type without such a code is written under a code of the same
size, complex numbers with one more dimension of two; the layout keeps the true type.
"""

from __future__ import annotations

from types import MappingProxyType

import msgspec


class DType(msgspec.Struct, frozen=True):
    """One data type.

    Attributes:
        name: torch's spelling, without `torch.`.
        itemsize: bytes an element; tensors are aligned to it in an image.
        code: the safetensors code it is written under.
        trailing: dimensions the written shape has behind the tensor's own.
    """

    name: str
    itemsize: int
    code: str
    trailing: tuple[int, ...] = ()


_NATIVE = (
    DType("float64", 8, "F64"),
    DType("float32", 4, "F32"),
    DType("float16", 2, "F16"),
    DType("bfloat16", 2, "BF16"),
    DType("float8_e4m3fn", 1, "F8_E4M3"),
    DType("float8_e5m2", 1, "F8_E5M2"),
    DType("int64", 8, "I64"),
    DType("int32", 4, "I32"),
    DType("int16", 2, "I16"),
    DType("int8", 1, "I8"),
    DType("uint64", 8, "U64"),
    DType("uint32", 4, "U32"),
    DType("uint16", 2, "U16"),
    DType("uint8", 1, "U8"),
    DType("bool", 1, "BOOL"),
)

# float4_e2m1fn_x2 holds two numbers a byte, and torch counts bytes in its shape: so does the file.
_BYTES = (
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("bits8", "bits1x8", "bits2x4", "bits4x2"),
)

_OTHERS = (
    *(DType(name, 1, "U8") for name in _BYTES),
    DType("bits16", 2, "U16"),
    DType("complex32", 4, "F16", (2,)),
    DType("bcomplex32", 4, "BF16", (2,)),
    DType("complex64", 8, "F32", (2,)),
    DType("complex128", 16, "F64", (2,)),
)

DTYPES: MappingProxyType[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _NATIVE + _OTHERS})
"""Every type an image can hold, by torch's name. Quantized types are not among them: their scale lies
elsewhere.
"""

_EXPONENTS = {
    "float64": (8, 0x7FF0 << 48, 0x7FF0 << 48),
    "float32": (4, 0x7F80 << 16, 0x7F80 << 16),
    "float16": (2, 0x7C00, 0x7C00),
    "bfloat16": (2, 0x7F80, 0x7F80),
    "float8_e5m2": (1, 0x7C, 0x7C),
    "float8_e4m3fn": (1, 0x7F, 0x7F),  # no infinity, and one NaN of each sign
    "float8_e4m3fnuz": (1, 0xFF, 0x80),  # one NaN, where others have -0
    "float8_e5m2fnuz": (1, 0xFF, 0x80),
    "float8_e8m0fnu": (1, 0xFF, 0xFF),
}
_PARTS = {"complex32": "float16", "bcomplex32": "bfloat16", "complex64": "float32", "complex128": "float64"}

NOT_FINITE: MappingProxyType[str, tuple[int, int, int]] = MappingProxyType(
    _EXPONENTS | {name: _EXPONENTS[part] for name, part in _PARTS.items()}
)
"""By type that can hold NaN or infinity: (bytes of a number, mask, value): a number whose bits are `value` under
`mask` is one of these.
"""

CODES: MappingProxyType[str, DType] = MappingProxyType(
    {dtype.code: dtype for dtype in _NATIVE}
    | {
        # Codes of later safetensors releases, met in other people's files.
        "F8_E4M3FNUZ": DTYPES["float8_e4m3fnuz"],
        "F8_E5M2FNUZ": DTYPES["float8_e5m2fnuz"],
        "F8_E8M0": DTYPES["float8_e8m0fnu"],
        "F4": DTYPES["float4_e2m1fn_x2"],
        "C64": DTYPES["complex64"],
    }
)
"""What a safetensors code stands for in anyone's file. `F4` counts numbers, not bytes, in its last
dimension.
"""
