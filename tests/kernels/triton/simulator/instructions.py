"""What each instruction of PTX does to a machine, except those of whole warps."""

import functools
from typing import Any

import numpy as np

from tests.kernels.triton.simulator import arithmetic, warp
from tests.kernels.triton.simulator.arithmetic import Array
from tests.kernels.triton.simulator.machine import Machine, Step
from tests.kernels.triton.simulator.parser import Instruction, Kernel

_CONTROL_FLOW = ("bra", "bra.uni", "ret", "bar.sync")
"""The machine does these itself."""
_NOTHING = (
    "bar.warp.sync", "fence", "membar", "prefetch", "griddepcontrol.launch_dependents",
    "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "cp.async.commit_group",
    "cp.async.wait_group",
)  # fmt: skip
"""What has no effect here, because the threads of a warp run in step, memory has no caches, and
products and copies are made at once."""


def translate(kernel: Kernel) -> list[Step]:
    """Return a step for each instruction.

    Raises:
        NotImplementedError: an instruction is not known.
    """
    return [_translate(instruction) for instruction in kernel.instructions]


def _translate(instruction: Instruction) -> Step:
    op = instruction.op
    if op in _CONTROL_FLOW or f"{op}.".startswith(tuple(f"{name}." for name in _NOTHING)):
        return _do_nothing
    if op == "griddepcontrol.wait":
        return _wait_for_previous
    for name, function in _STEPS.items():
        if f"{op}.".startswith(f"{name}."):
            return functools.partial(function, instruction)
    operation = arithmetic.find(op)
    pairs = operation.sources[0].endswith("x2") and operation.result == "pred"
    if len(instruction.operands) != 1 + len(operation.sources) or (
        "|" in instruction.text and not pairs
    ):
        raise NotImplementedError(instruction.text)
    return functools.partial(_compute, instruction, operation)


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
        assert (address.offset, len(targets)) == (0, 1), instruction.text
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
    machine.check_wait(threads)
    operands = machine.read_all(operand, type)
    before = np.zeros(len(mask), dtype)
    update = {"add": np.add, "max": np.maximum, "min": np.minimum}[name]
    for thread, place in zip(threads, index[:, 0], strict=True):
        before[thread] = cells[place]
        cells[place] = update(cells[place], operands[thread])
    machine.write(target, before, type, mask)


def _copy(instruction: Instruction, machine: Machine, mask: Array) -> None:
    """cp.async. A copy is made at once."""
    target, source, size, *bytes_read = instruction.operands
    threads = np.flatnonzero(mask)
    count = machine.read_all(bytes_read[0] if bytes_read else size, "u32")
    assert np.isin(count[mask], (0, size)).all()
    read = np.flatnonzero(mask & (count > 0))
    word = np.dtype("u4")
    numbers = np.zeros((len(mask), size // word.itemsize), word)
    places = machine.addresses(source, read)
    numbers[read] = machine.load("global", places, read, word, numbers.shape[1])
    machine.store("shared", machine.addresses(target, threads), threads, numbers[threads])


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
