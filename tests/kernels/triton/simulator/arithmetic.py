"""What PTX instructions compute for each thread by itself (PTX ISA, section 9.7). Arrays hold one
number for each thread, or one for all of them. Knows no memory and no control flow.

Approximate functions are computed as exactly as float32 allows. Subnormal numbers are kept.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

Array = np.ndarray[Any, Any]


_OTHER_WIDTHS = {"pred": 1, "e4m3": 1, "e4m3x2": 2}


class Operation(NamedTuple):
    """An instruction that computes `function` from operands of the types `sources`."""

    function: Callable[..., Array]
    sources: tuple[str, ...]
    result: str


@functools.cache
def width(type: str) -> int:
    """Return the bytes of a number of a type such as "s32", "bf16x2" or "b8"."""
    if type in _OTHER_WIDTHS:
        return _OTHER_WIDTHS[type]
    bits = re.fullmatch(r"(?:tf|bf|[a-z])(\d+)(x2)?", type)
    assert bits, type
    return int(bits[1]) * (2 if bits[2] else 1) // 8


@functools.cache
def bits_type(type: str) -> np.dtype[Any]:
    """Return the dtype of a register that holds the bits of one number of `type`."""
    return np.dtype(bool) if type == "pred" else np.dtype(f"u{width(type)}")


@functools.cache
def _number_type(type: str) -> np.dtype[Any]:
    """Return the dtype of numbers of `type`, which numpy has."""
    kind = {"s": "i", "f": "f"}.get(type[0], "u")
    return np.dtype(f"{kind}{width(type)}")


def decode(bits: Array, type: str) -> Array:
    """Return the numbers in a register. bf16 becomes float32; pairs get a last dimension of 2."""
    if type == "pred":
        return bits
    if type.endswith("x2"):
        halves = np.atleast_1d(bits).view(f"u{width(type) // 2}").reshape(*np.shape(bits), 2)
        return _from_e4m3(halves) if type == "e4m3x2" else decode(halves, type[:-2])
    bits = bits.astype(bits_type(type), copy=False)
    if type == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(_number_type(type))


def encode(numbers: Array, type: str) -> Array:
    """Return the bits of `numbers`, rounded to nearest even where `type` is narrower."""
    if type == "pred":
        return numbers
    if type == "e4m3x2":
        halves = _to_e4m3(numbers)
        return np.ascontiguousarray(halves).view("u2")[..., 0]
    if type.endswith("x2"):
        halves = np.ascontiguousarray(encode(numbers, type[:-2]))
        return halves.view(bits_type(type))[..., 0]
    if type == "bf16":
        bits = numbers.astype(np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16
        return np.where(np.isnan(numbers), 0x7FFF, rounded).astype(np.uint16)
    if type == "tf32":  # cvt.rna: to nearest, ties away from zero
        bits = numbers.astype(np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        return np.where(np.isnan(numbers), 0x7FFFFFFF, rounded).astype(np.uint32)
    return np.asarray(numbers).astype(_number_type(type), copy=False).view(bits_type(type))


def _from_e4m3(bits: Array) -> Array:
    values = torch.from_numpy(np.array(bits, np.uint8)).view(torch.float8_e4m3fn)
    return values.float().numpy()


def _to_e4m3(numbers: Array) -> Array:
    clipped = torch.from_numpy(np.clip(numbers, -448, 448))  # "satfinite"
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@functools.cache
def find(op: str) -> Operation:
    """Return what the instruction `op` computes.

    Raises:
        NotImplementedError: it is not among those that are known.
    """
    name, *suffixes = op.split(".")
    type = suffixes[-1] if suffixes else ""
    parts = [suffix for suffix in suffixes[:-1] if suffix not in _WITHOUT_EFFECT]
    if name == "cvt":
        return _conversion(op, parts, type)
    if name == "setp" and len(parts) == 1 and parts[0] in _COMPARISONS:
        return Operation(_COMPARISONS[parts[0]], (type, type), "pred")
    if name in ("mul", "mad") and parts in (["wide"], ["hi"], ["lo"]):
        return _product(name, parts[0], type)
    if name in ("min", "max") and parts == ["NaN"]:
        return Operation(np.minimum if name == "min" else np.maximum, (type, type), type)
    if name in ("min", "max") and parts == ["relu"] and type == "s32":  # a result below 0 is 0
        choose = np.minimum if name == "min" else np.maximum
        return Operation(lambda a, b: np.maximum(choose(a, b), np.int32(0)), (type, type), type)
    if name == "min" and parts[-2:] == ["xorsign", "abs"] and parts[:-2] in ([], ["NaN"]):
        minimum = np.minimum if "NaN" in parts else np.fmin
        return Operation(functools.partial(_min_xorsign, minimum), (type, type), type)
    if parts:
        raise NotImplementedError(op)
    if name == "selp":
        bits = f"b{8 * width(type)}"
        return Operation(lambda a, b, p: np.where(p, a, b), (bits, bits, "pred"), bits)
    if name in ("shl", "shr"):
        return Operation(_shift_left if name == "shl" else _shift_right, (type, "u32"), type)
    if name == "bfe":
        return Operation(_bit_field, (type, "u32", "u32"), type)
    if name == "div" and type[0] == "f":
        return Operation(np.divide, (type, type), type)
    if name not in _FUNCTIONS:
        raise NotImplementedError(op)
    count, function = _FUNCTIONS[name]
    return Operation(function, (type,) * count, type)


def _conversion(op: str, parts: list[str], of: str) -> Operation:
    *rounding, to = parts
    allowed = {"tf32": ["rna"], "e4m3x2": ["satfinite"]}.get(to, [])
    if (rounding, to, of) == (["rz"], "f16", "f32"):
        return Operation(_truncate, (of,), to)
    if rounding != allowed or (of[0] == "f" and to[0] in "su") or to == of:
        raise NotImplementedError(op)
    if of == "f32" and to.endswith("x2"):  # the first operand is the upper half
        return Operation(lambda a, b: np.stack(np.broadcast_arrays(b, a), -1), (of, of), to)
    return Operation(lambda a: a, (of,), to)


def _truncate(a: Array) -> Array:
    """Return float16 numbers, rounded towards 0."""
    nearest = a.astype(np.float16)
    is_larger = np.abs(nearest.astype(np.float32)) > np.abs(a)
    return np.where(is_larger, np.nextafter(nearest, np.float16(0)), nearest)


def _product(name: str, part: str, type: str) -> Operation:
    wide = f"{type[0]}{16 * width(type)}"
    if part == "hi":
        assert name == "mul"
        return Operation(functools.partial(_high_product, type), (type, type), type)
    if part == "lo":
        if name == "mul":
            return Operation(np.multiply, (type, type), type)
        return Operation(lambda a, b, c: a * b + c, (type, type, type), type)

    def multiply(a: Array, b: Array, c: Array | int = 0) -> Array:
        dtype = _number_type(wide)
        return a.astype(dtype) * b.astype(dtype) + np.asarray(c).astype(dtype)

    sources = (type, type) if name == "mul" else (type, type, wide)
    return Operation(multiply, sources, wide)


def _high_product(type: str, a: Array, b: Array) -> Array:
    bits = 8 * width(type)
    if bits < 64:
        kind = "i8" if type[0] == "s" else "u8"
        return a.astype(kind) * b.astype(kind) >> bits
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
    middle = x1 * y0 + (x0 * y0 >> half)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if type[0] == "s":
        high = high - np.where(a < 0, y, 0).astype("u8") - np.where(b < 0, x, 0).astype("u8")
    return high.view(a.dtype)


def _shift_left(a: Array, count: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(count < bits, a << np.minimum(count, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: Array, count: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(count, bits - 1).astype(a.dtype)
    if a.dtype.kind == "i":
        return shifted
    return np.where(count < bits, shifted, a.dtype.type(0))


def _bit_field(a: Array, first: Array, count: Array) -> Array:
    field = (a.astype("i8") >> first.astype("i8")) & ((1 << count.astype("i8")) - 1)
    if a.dtype.kind == "u":
        return field
    sign = 1 << np.maximum(count.astype("i8") - 1, 0)
    return (field ^ sign) - sign


def _permute(a: Array, b: Array, selector: Array) -> Array:
    both = a.astype("u8") | b.astype("u8") << np.uint64(32)
    result = np.zeros((), np.uint64)
    for index in range(4):
        choice = selector.astype("u8") >> np.uint64(4 * index)
        byte = both >> (8 * (choice & np.uint64(7))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(choice & np.uint64(8), sign, byte)
        result = result | byte << np.uint64(8 * index)
    return result


def _divide(a: Array, b: Array) -> Array:
    """Return the quotient, rounded towards 0; of a division by 0, anything."""
    divisor = np.where(b == 0, a.dtype.type(1), b)
    return a // divisor + ((a % divisor != 0) & ((a < 0) ^ (divisor < 0)))


def _fma(a: Array, b: Array, c: Array) -> Array:
    wide = np.longdouble if a.dtype == np.float64 else np.float64
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


def _min_xorsign(minimum: Callable[..., Array], a: Array, b: Array) -> Array:
    smaller = minimum(np.abs(a), np.abs(b))
    return np.copysign(smaller, np.where(np.signbit(a) ^ np.signbit(b), -1, 1).astype(a.dtype))


def _unordered(compare: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


_WITHOUT_EFFECT = ("rn", "approx", "full", "ftz")
"""Suffixes of what is done anyway, and of what the module's docstring says."""
_ORDERED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[..., Array]] = {
    **_ORDERED,
    **{f"{name}u": _unordered(compare) for name, compare in _ORDERED.items()},
    "ne": lambda a, b: (a < b) | (a > b),  # false where one is NaN
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}
_FUNCTIONS: dict[str, tuple[int, Callable[..., Array]]] = {
    "mov": (1, lambda a: a),
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "fma": (3, _fma),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "min": (2, np.fmin),
    "max": (2, np.fmax),
    "and": (2, np.bitwise_and),
    "or": (2, np.bitwise_or),
    "xor": (2, np.bitwise_xor),
    "not": (1, np.invert),
    "div": (2, _divide),
    "rem": (2, lambda a, b: a - _divide(a, b) * b),
    "prmt": (3, _permute),
    "popc": (1, np.bitwise_count),
    "ex2": (1, np.exp2),
    "sqrt": (1, np.sqrt),
    "rsqrt": (1, lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype)),
}
