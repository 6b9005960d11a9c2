"""What each instruction of PTX does to a machine, but for those of whole warps."""

import functools
from typing import Any

import numpy as np

from tests.kernels.triton.simulator import arithmetic, warp
from tests.kernels.triton.simulator.arithmetic import Array
from tests.kernels.triton.simulator.machine import Copy, Machine, Step
from tests.kernels.triton.simulator.parser import Instruction, Kernel

_CONTROL_FLOW = ("bra", "ret", "bar.sync")
"""The machine does these itself."""
_NOTHING = (
    "bar.warp.sync", "fence", "membar", "prefetch", "griddepcontrol.launch_dependents",
    "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group",
)  # fmt: skip
"""What has no effect here, because the threads of a warp run in step, memory has no caches, and
products are computed at once."""


def translate(kernel: Kernel) -> list[Step]:
    """Return a step for each instruction.

    Raises:
        NotImplementedError: an instruction is not known.
    """
    return [_translate(instruction) for instruction in kernel.instructions]


def _translate(instruction: Instruction) -> Step:
    op = instruction.op
    if op.startswith((*_CONTROL_FLOW, *_NOTHING)):
        return _do_nothing
    if op == "griddepcontrol.wait":
        return _wait_for_previous
    for name, function in _STEPS.items():
        if op == name or op.startswith(f"{name}."):
            return functools.partial(function, instruction)
    return functools.partial(_compute, instruction, arithmetic.find(op))


def _do_nothing(machine: Machine, mask: Array) -> None:
    pass


def _wait_for_previous(machine: Machine, mask: Array) -> None:
    machine.has_waited = machine.has_waited | mask


def _compute(
    instruction: Instruction, operation: arithmetic.Operation, machine: Machine, mask: Array
) -> None:
    target, *sources = instruction.operands
    values = map(machine.read, sources, operation.sources)
    result = operation.function(*values)
    if isinstance(target, tuple) and operation.result == "pred":  # comparisons of pairs
        for index, register in enumerate(target):
            machine.write(register, result[..., index], "pred", mask)
    else:
        machine.write(target, result, operation.result, mask)


def _parts(operand: Any) -> tuple[Any, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _load(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """ld.global, ld.shared, ld.param"""
    space, type = instruction.op.split(".")[1], instruction.op.split(".")[-1]
    targets, address = _parts(instruction.operands[0]), instruction.operands[1]
    if space == "param":
        value = machine.read(machine.parameter(address.base), type)
        machine.write(targets[0], value, type, mask)
        return
    threads = np.flatnonzero(mask)
    places, bits = machine.addresses(address, threads), arithmetic.bits_type(type)
    found = machine.load(space, places, threads, bits, len(targets))
    for index, register in enumerate(targets):
        values = np.zeros(len(mask), bits)
        values[threads] = found[:, index]
        machine.write(register, arithmetic.decode(values, type), type, mask)


def _store(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """st.global, st.shared"""
    space, type = instruction.op.split(".")[1], instruction.op.split(".")[-1]
    threads = np.flatnonzero(mask)
    places = machine.addresses(instruction.operands[0], threads)
    numbers = [machine.read_all(x, type)[threads] for x in _parts(instruction.operands[1])]
    machine.store(space, places, threads, np.stack(numbers, 1))


def _atomic(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """atom, one thread after another"""
    _, space, *_, name, type = instruction.op.split(".")
    target, address, operand = instruction.operands
    threads = np.flatnonzero(mask)
    places = machine.addresses(address, threads)
    dtype = machine.read(0, type).dtype
    cells, index = machine.cells(space, places, threads, dtype, 1)
    assert machine.has_waited[threads].all(), "an atomic operation before the wait"
    operands = machine.read_all(operand, type)
    before = np.zeros(len(mask), dtype)
    update = {"add": np.add, "max": np.maximum, "min": np.minimum}[name]
    for thread, place in zip(threads, index[:, 0], strict=True):
        before[thread] = cells[place]
        cells[place] = update(cells[place], operands[thread])
    machine.write(target, before, type, mask)


def _copy(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """cp.async, cp.async.commit_group, cp.async.wait_group. A copy is made as late as possible."""
    if instruction.op == "cp.async.commit_group":
        machine.copy_group = machine.copy_group + mask
        return
    if instruction.op == "cp.async.wait_group":
        _finish_copies(machine, mask, instruction.operands[0])
        return
    target, source, size, *bytes_read = instruction.operands
    threads = np.arange(len(mask))
    count = machine.read_all(bytes_read[0] if bytes_read else size, "u32")
    assert np.isin(count[mask], (0, size)).all()
    targets = machine.addresses(target, threads)
    machine.check_writes(targets[mask], threads[mask], size)
    sources = machine.addresses(source, threads)
    machine.copies.append(Copy(size, mask.copy(), machine.copy_group, targets, sources, count == 0))


def _finish_copies(machine: Machine, mask: Array, open_groups: int) -> None:
    for copy in machine.copies:
        done = copy.mask & mask & (copy.group < machine.copy_group - open_groups)
        copy.mask[done] = False
        read = np.flatnonzero(done & ~copy.is_zero)
        word = np.dtype("u4") if copy.size >= 4 else np.dtype(f"u{copy.size}")
        count = copy.size // word.itemsize
        numbers = np.zeros((len(mask), count), word)
        numbers[read] = machine.load("global", copy.source[read], read, word, count)
        threads = np.flatnonzero(done)
        machine.store("shared", copy.target[threads], threads, numbers[threads])
    machine.copies = [copy for copy in machine.copies if copy.mask.any()]


_STEPS = {
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "cp.async": _copy,
    "shfl.sync": warp.shuffle,
    "redux.sync": warp.reduce,
    "ldmatrix": warp.load_matrices,
    "stmatrix": warp.store_matrices,
    "mma.sync": warp.multiply,
    "wgmma.mma_async": warp.multiply_group,
}
