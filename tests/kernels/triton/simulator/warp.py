"""Instructions of all threads of a warp: shuffles, and the matrices of the tensor cores (PTX ISA,
sections 9.7.9, 9.7.14 and 9.7.15). Products are added up as the tensor cores of Hopper do it.
"""

import re

import numpy as np

from tests.kernels.triton.simulator import arithmetic
from tests.kernels.triton.simulator.arithmetic import Array
from tests.kernels.triton.simulator.machine import Machine
from tests.kernels.triton.simulator.memory import WARP
from tests.kernels.triton.simulator.parser import Instruction, Operand

_LANE = np.arange(WARP)
_GROUP, _QUAD = _LANE // 4, _LANE % 4
_WARPS = 4
"""Warps that compute a product together by `wgmma`."""
_FRACTION_BITS_OF_FP8 = 13
"""What `wgmma` keeps of each product, below the first bit of the largest. Of 16 bits and TF32 it is
25 bits: so many that this does not cut there.
"""


def shuffle(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """shfl.sync: each thread gets the value of another one."""
    machine.warps(mask)
    target, value, offset, clamp, members = instruction.operands
    assert members == -1
    of, offsets, clamps = (
        machine.read_all(x, "u32").reshape(-1, WARP).astype(np.int64)
        for x in (value, offset, clamp)
    )
    offsets, segment, clamps = offsets & 31, clamps >> 8 & 31, clamps & 31
    last = (_LANE & segment) | (clamps & ~segment)
    mode = instruction.op.split(".")[2]
    source = {
        "up": _LANE - offsets,
        "down": _LANE + offsets,
        "bfly": _LANE ^ offsets,
        "idx": (_LANE & segment) | (offsets & ~segment),
    }[mode]
    valid = source >= last if mode == "up" else source <= last
    result = np.take_along_axis(of, np.where(valid, source, _LANE), 1).reshape(-1)
    registers = target if isinstance(target, tuple) else (target,)
    machine.write(registers[0], result, "u32", mask)
    for register in registers[1:]:
        machine.write(register, valid.reshape(-1), "pred", mask)


def reduce(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """redux.sync: all threads get the sum, minimum or maximum of a warp."""
    machine.warps(mask)
    *_, name, type = instruction.op.split(".")
    assert type[0] in "su"
    values = machine.read_all(instruction.operands[1], type).reshape(-1, WARP)
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]
    result = np.repeat(function.reduce(values, 1, dtype=values.dtype), WARP)
    machine.write(instruction.operands[0], result, type, mask)


def load_matrices(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """ldmatrix: matrices of 8 x 8 numbers of 16 bits; the lane 8 i + j has the address of row j of
    matrix i, and of row `group` each lane gets the pair `quad`; transposed, of column `group`.
    """
    threads, rows = _row_addresses(instruction, machine, mask, instruction.operands[1])
    for index, register in enumerate(instruction.operands[0]):
        result = np.zeros(len(mask), np.uint32)
        for part, (lane, offset) in enumerate(_pairs(instruction, index)):
            address = (rows[:, lane] + offset.astype(np.uint64)).reshape(-1)
            half = machine.load("shared", address, threads, "u2", 1)[:, 0]
            result[threads] |= half.astype(np.uint32) << np.uint32(16 * part)
        machine.write(register, result, "b32", mask)


def store_matrices(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """stmatrix: the reverse of `load_matrices`."""
    threads, rows = _row_addresses(instruction, machine, mask, instruction.operands[0])
    for index, register in enumerate(instruction.operands[1]):
        value = machine.read_all(register, "b32")[threads]
        for part, (lane, offset) in enumerate(_pairs(instruction, index)):
            address = (rows[:, lane] + offset.astype(np.uint64)).reshape(-1)
            half = (value >> np.uint32(16 * part)).astype(np.uint16)
            machine.store("shared", address, threads, half[:, None])


def _row_addresses(
    instruction: Instruction, machine: Machine, mask: Array, operand: Operand
) -> tuple[Array, Array]:
    """Return the threads of the warps of `mask`, and the addresses [W, 32] of their lanes."""
    machine.warps(mask)
    assert ".m8n8." in instruction.op
    assert instruction.op.endswith(".b16")
    threads = np.flatnonzero(mask)
    rows = machine.addresses(operand, threads).reshape(-1, WARP)
    count = 8 * int(re.search(r"\.x(\d)", instruction.op)[1])  # type: ignore[index]
    assert not (rows[:, :count] % 16).any(), "rows are aligned to 16 bytes"
    return threads, rows


def _pairs(instruction: Instruction, matrix: int) -> list[tuple[Array, Array]]:
    """Return, for both halves of a register, which lane has the address of its row, and its offset
    in the row in bytes.
    """
    if ".trans" in instruction.op:
        return [(8 * matrix + 2 * _QUAD + half, 2 * _GROUP) for half in range(2)]
    return [(8 * matrix + _GROUP, 4 * _QUAD + 2 * half) for half in range(2)]


def multiply(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """mma.sync: D = A times B + C for matrices of a warp: A is [16, K], B [K, 8]."""
    warps = machine.warps(mask)
    parts = instruction.op.split(".")
    assert parts[3].startswith("m16n8k")
    assert parts[4:7] == ["row", "col", "f32"]
    target, of_a, of_b, of_c = instruction.operands
    a = _read_a(machine, of_a, parts[7])[warps]
    b = _unpack(machine, of_b, parts[8])[:, warps]
    per_register = b.shape[-1]
    matrix = np.zeros((len(warps), 4 * per_register * len(b), 8), np.float32)
    for index, values in enumerate(b):
        for part in range(per_register):
            row = _QUAD * per_register + part + 4 * per_register * index
            matrix[:, row, _GROUP] = values[..., part]
    places = [_place_of_result(index) for index in range(len(target))]
    old = np.zeros((len(mask) // WARP, 16, 8), np.float32)
    for (row, column), register in zip(places, of_c, strict=True):
        old[:, row, column] = machine.read_all(register, "f32").reshape(-1, WARP)
    result = np.zeros_like(old)
    result[warps] = add_products(a, matrix, old[warps])
    for (row, column), register in zip(places, target, strict=True):
        machine.write(register, result[:, row, column].reshape(-1), "f32", mask)


def add_products(a: Array, b: Array, c: Array, fraction_bits: int | None = None) -> Array:
    """Return A times B plus C, of [W, M, K], [W, K, N] and [W, M, N], as tensor cores add up.

    They cut each product, and C, at so many bits below the first bit of the largest of these. What
    is added up then is cut to float32. Nothing is rounded to nearest.
    """
    a, b, c = a.astype(np.float64), b.astype(np.float64), c.astype(np.float64)
    exact = a @ b + c
    if fraction_bits is not None:
        products = [a[:, :, k, None] * b[:, k, None, :] for k in range(a.shape[2])]
        largest = np.max([np.abs(x) for x in (c, *products)], 0)
        unit = np.ldexp(1.0, np.frexp(largest)[1] - 1 - fraction_bits)
        cut = np.sum([np.trunc(x / unit) for x in (c, *products)], 0) * unit
        exact = np.where(np.isfinite(largest), cut, exact)
    rounded = exact.astype(np.float32)
    above = np.isfinite(rounded) & (np.abs(rounded) > np.abs(exact))
    return np.where(above, np.nextafter(rounded, np.float32(0)), rounded)


def _read_a(machine: Machine, registers: tuple[Operand, ...], type: str) -> Array:
    """Return the matrices A [W, 16, K] of all warps."""
    values = _unpack(machine, registers, type)
    per_register = values.shape[-1]
    matrix = np.zeros((values.shape[1], 16, 8 * per_register), np.float32)
    for index, of_register in enumerate(values):
        for part in range(per_register):
            column = _QUAD * per_register + part + 4 * per_register * (index // 2)
            matrix[:, _GROUP + 8 * (index % 2), column] = of_register[..., part]
    return matrix


def _unpack(machine: Machine, registers: tuple[Operand, ...], type: str) -> Array:
    """Return the numbers [registers, W, 32, n] that registers of all threads hold."""
    bits = np.stack([machine.read_all(register, "b32") for register in registers])
    bits = np.ascontiguousarray(bits).reshape(len(registers), -1, WARP)
    return _numbers(bits[..., None].view(f"u{arithmetic.width(type)}"), type)


def _numbers(bits: Array, type: str) -> Array:
    """Return float32 numbers as the tensor cores read them."""
    if type == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if type == "e4m3":
        pairs = np.ascontiguousarray(bits).view("u2")
        return arithmetic.decode(pairs, "e4m3x2").reshape(bits.shape)
    return arithmetic.decode(bits, type).astype(np.float32)


def _place_of_result(index: int) -> tuple[Array, Array]:
    """Return row and column of the numbers in register `index` of the result, for each lane."""
    return _GROUP + 8 * (index % 4 // 2), 8 * (index // 4) + 2 * _QUAD + index % 2


def multiply_group(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """wgmma.mma_async: D = A times B, or that + D, for four warps: A is [64, K], B [K, N]. B, and A
    or not, lie in shared memory. The product is there at once.
    """
    warps = machine.warps(mask)
    groups = warps[::_WARPS] // _WARPS
    assert (warps.reshape(-1, _WARPS) == groups[:, None] * _WARPS + np.arange(_WARPS)).all()
    parts = instruction.op.split(".")
    rows, columns, depth = map(int, re.findall(r"\d+", parts[4]))
    type = parts[6]
    target, of_a, of_b, adds, *scales = instruction.operands
    assert parts[5:] == ["f32", type, type]
    assert scales[:2] == [1, 1]
    transposed = scales[2:]  # of A if it lies in shared memory, and of B
    threads = groups * _WARPS * WARP
    if isinstance(of_a, tuple):
        a = _read_a(machine, of_a, type).reshape(-1, rows, depth)[groups]
    else:
        flip = bool(transposed and transposed[0])
        a = _read_shared(machine, of_a, threads, type, (rows, depth), flip)
    flip = bool(transposed and transposed[-1])
    b = _read_shared(machine, of_b, threads, type, (columns, depth), flip)
    keeps = machine.read_all(adds, "pred").reshape(-1, WARP)
    places = [_place_of_result(index) for index in range(len(target))]
    old = np.zeros((len(mask) // WARP, 16, columns), np.float32)
    for (row, column), register in zip(places, target, strict=True):
        values = machine.read_all(register, "f32").reshape(-1, WARP)
        old[:, row, column] = np.where(keeps, values, np.float32(0))
    bits = _FRACTION_BITS_OF_FP8 if type == "e4m3" else None
    c = old[warps].reshape(-1, rows, columns)
    result = np.zeros_like(old)
    result[warps] = add_products(a, b.transpose(0, 2, 1), c, bits).reshape(-1, 16, columns)
    for (row, column), register in zip(places, target, strict=True):
        machine.write(register, result[:, row, column].reshape(-1), "f32", mask)


def _read_shared(
    machine: Machine,
    descriptor: Operand,
    threads: Array,
    type: str,
    shape: tuple[int, int],
    transposed: bool,
) -> Array:
    """Return matrices [T, *shape] that lie in shared memory as the descriptors of threads [T] say
    (section 9.7.15.5.1). The first dimension is that of rows of A or columns of B.
    """
    bits = machine.read_all(descriptor, "b64")[threads].astype(np.int64)[:, None, None]
    start, leading, stride = (((bits >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode = int(bits[0, 0, 0] >> 62 & 3)
    assert mode, "a layout without swizzling"
    assert not (bits >> 49 & 7).any(), "an offset of the base"
    row_bytes, size = 256 >> mode, arithmetic.width(type)
    index, k = np.arange(shape[0])[:, None], np.arange(shape[1])[None, :]
    if transposed:
        per_row = row_bytes // size
        place = index // per_row * leading + k // 8 * stride
        place = place + k % 8 * row_bytes + index % per_row * size
    else:
        assert shape[1] * size <= row_bytes
        place = index // 8 * stride + index % 8 * row_bytes + k * size
    address = start + place
    address = address ^ (address >> 7 & (row_bytes // 16 - 1)) << 4
    reader = np.repeat(threads, shape[0] * shape[1])
    flat = address.reshape(-1).astype(np.uint64)
    found = machine.load("shared", flat, reader, f"u{size}", 1)
    return _numbers(found.reshape(-1, *shape), type)
