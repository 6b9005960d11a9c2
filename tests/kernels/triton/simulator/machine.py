"""Threads of a kernel's programs, in step as far as their branches allow: registers, control flow
and barriers. A register is an array with a number for each thread.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernels.triton.simulator import arithmetic
from tests.kernels.triton.simulator.arithmetic import Array
from tests.kernels.triton.simulator.memory import (
    SHARED_BASE,
    WARP,
    GlobalMemory,
    KernelError,
    SharedMemory,
)
from tests.kernels.triton.simulator.parser import Address, Instruction, Kernel, Operand

_RUNNING, _WAITING, _ENDED = range(3)

Step = Callable[["Machine", Array], None]
"""Runs an instruction for the threads of a mask."""


class Machine:
    """Programs of one launch.

    Args:
        kernel: its code.
        steps: what `translate` made of it.
        parameters: the bits of each.
        programs: [P, 3] their numbers.
        grid: how many programs there are in each dimension.
        shared_bytes: of a program.
    """

    def __init__(
        self,
        kernel: Kernel,
        steps: list[Step],
        parameters: list[int],
        programs: Array,
        grid: tuple[int, int, int],
        shared_bytes: int,
        memory: GlobalMemory,
    ) -> None:
        self.kernel, self._steps = kernel, steps
        self._memory, self._parameters = memory, parameters
        self._branches = frozenset(kernel.labels.values())
        self.program_size = kernel.num_threads
        count = len(programs)
        self.shared = SharedMemory(count, self.program_size, shared_bytes)
        thread = np.tile(np.arange(self.program_size, dtype=np.uint32), count)
        self.registers: dict[str, Array] = {"%tid.x": thread, "%laneid": thread % WARP}
        for axis, name in enumerate("xyz"):
            number = np.repeat(programs[:, axis].astype(np.uint32), self.program_size)
            self.registers[f"%ctaid.{name}"] = number
            self.registers[f"%nctaid.{name}"] = np.uint32(grid[axis])  # type: ignore[assignment]
        self.pc = np.zeros(len(thread), np.int32)
        self.state = np.zeros(len(thread), np.uint8)
        waits = any(x.op == "griddepcontrol.wait" for x in kernel.instructions)
        self.has_waited = np.full(len(thread), not waits)  # for the previous kernel

    # Control flow.

    def run(self) -> None:
        """Run all programs to their end."""
        while True:
            running = self.state == _RUNNING
            if running.any():
                first = self.pc[running].min()
                self._run_from(int(first), running & (self.pc == first))
            elif (self.state == _WAITING).any():
                self._open_barriers()
            else:
                return
            self._drop_ended_programs()

    def _run_from(self, pc: int, mask: Array) -> None:
        """Run the threads of `mask` until they diverge, wait, end, or may meet others."""
        start = pc
        while pc == start or pc not in self._branches or mask.all():
            start = -1
            instruction = self.kernel.instructions[pc]
            active = self._guard(instruction, mask)
            name = instruction.op.partition(".")[0]
            if name == "bra":
                target = self.kernel.labels[instruction.operands[0]]
                if (active == mask).all():
                    pc = target
                    continue
                if active.any():
                    self.pc[active] = target
                    self.pc[mask & ~active] = pc + 1
                    return
            elif name == "ret":
                self.state[active] = _ENDED
                mask = mask & ~active
                if not mask.any():
                    return
            elif instruction.op == "bar.sync":
                assert (instruction.guard, instruction.operands) == (None, (0,)), instruction.text
                self.state[mask] = _WAITING
                self.pc[mask] = pc
                return
            elif active.any():
                try:
                    self._steps[pc](self, active)
                except KernelError as error:
                    raise KernelError(f"{error}: {self.kernel.name}: {instruction.text}") from None
            pc += 1
        self.pc[mask] = pc

    def _guard(self, instruction: Instruction, mask: Array) -> Array:
        if instruction.guard is None:
            return mask
        predicate = self._bits(instruction.guard)
        return mask & (~predicate if instruction.negated else predicate)

    def _open_barriers(self) -> None:
        """Let the threads of each program pass their barrier: all wait, or have ended."""
        waiting = self.state == _WAITING
        by_program = np.where(waiting, self.pc, -1).reshape(-1, self.program_size)
        same = (by_program == by_program.max(1, keepdims=True)) | (by_program == -1)
        if not same.all():
            raise KernelError(f"threads wait at different barriers: {self.kernel.name}")
        self.pc[waiting] += 1
        self.state[waiting] = _RUNNING

    def _drop_ended_programs(self) -> None:
        """Forget programs that have ended, if they are many."""
        live = (self.state != _ENDED).reshape(-1, self.program_size).any(1)
        if live.sum() * 2 > len(live) or not live.any():
            return
        threads = np.repeat(live, self.program_size)
        self.registers = {
            name: value[threads] if np.size(value) == len(threads) else value
            for name, value in self.registers.items()
        }
        self.pc, self.state = self.pc[threads], self.state[threads]
        self.has_waited = self.has_waited[threads]
        self.shared.keep(live)

    # Registers.

    def read(self, operand: Operand, type: str) -> Array:
        """Return the numbers of an operand."""
        bits = arithmetic.bits_type(type)
        if isinstance(operand, int):
            value = np.array(operand & (2 ** (8 * bits.itemsize) - 1)).astype(bits)
        elif operand == "global_smem":
            value = np.array(SHARED_BASE, bits)
        elif isinstance(operand, tuple):  # parts, the lowest first
            part = 8 * bits.itemsize // len(operand)
            parts = [self.read(x, f"b{part}").astype(bits) for x in operand]
            value = np.bitwise_or.reduce(
                [x << bits.type(part * i) for i, x in enumerate(np.broadcast_arrays(*parts))]
            )
        else:
            value = np.asarray(self._bits(operand))
        return arithmetic.decode(value, type)

    def read_all(self, operand: Operand, type: str) -> Array:
        """Return the numbers of an operand, one for each thread."""
        return np.broadcast_to(self.read(operand, type), len(self.pc))

    def write(self, operand: Operand, numbers: Array, type: str, mask: Array) -> None:
        """Set registers of the threads of `mask`."""
        if isinstance(operand, tuple):
            bits = arithmetic.encode(numbers, type)
            part = 8 * bits.dtype.itemsize // len(operand)
            for index, register in enumerate(operand):
                self.write(register, bits >> bits.dtype.type(part * index), f"b{part}", mask)
        elif operand != "_":
            self._set(operand, arithmetic.encode(numbers, type), mask, signed=type[0] == "s")

    def _set(self, register: str, bits: Array, mask: Array, signed: bool = False) -> None:
        wanted = arithmetic.bits_type(self.kernel.registers[register])
        if bits.dtype != wanted:
            bits = (bits.view(f"i{bits.dtype.itemsize}") if signed else bits).astype(wanted)
        if not mask.all():
            bits = np.where(mask, bits, self._bits(register))
        self.registers[register] = bits

    def _bits(self, register: str) -> Array:
        """Return a register. Before it is set, all its bits are: a NaN if it is a float."""
        if register in self.registers:
            return self.registers[register]
        dtype = arithmetic.bits_type(self.kernel.registers[register])
        return np.invert(np.zeros((), dtype))

    def parameter(self, name: str) -> int:
        """Return the bits of a parameter of the kernel."""
        return self._parameters[int(name.rpartition("_")[2])]

    def warps(self, mask: Array) -> Array:
        """Return the warps of `mask`, all of whose threads must be in it."""
        by_warp = mask.reshape(-1, WARP)
        if (by_warp.any(1) != by_warp.all(1)).any():
            raise KernelError("some threads of a warp are missing")
        return np.flatnonzero(by_warp.all(1))

    # Memory.

    def addresses(self, operand: Address, threads: Array) -> Array:
        """Return the addresses of an operand, one for each of `threads`, as 64 bits."""
        shared = operand.base == "global_smem" or (
            isinstance(operand.base, str) and self.kernel.registers.get(operand.base) == "b32"
        )
        base = self.read_all(operand.base, "u32" if shared else "u64")[threads]
        return base.astype(np.uint64) + np.uint64(operand.offset % 2**64)

    def load(self, space: str, address: Array, threads: Array, dtype: Any, count: int) -> Array:
        """Return [T, count] numbers in memory from the `address` of each thread on."""
        cells, index = self.cells(space, address, threads, np.dtype(dtype), count)
        return cells[index]

    def store(self, space: str, address: Array, threads: Array, numbers: Array) -> None:
        """Write [T, count] numbers to memory."""
        cells, index = self.cells(space, address, threads, numbers.dtype, numbers.shape[1])
        if space == "global":
            self.check_wait(threads)
        cells[index] = numbers

    def check_wait(self, threads: Array) -> None:
        """Raise an error for a thread that has not waited for the previous kernel."""
        if not self.has_waited[threads].all():
            raise KernelError("a store before the wait for the previous kernel")

    def cells(
        self, space: str, address: Array, threads: Array, dtype: np.dtype[Any], count: int
    ) -> tuple[Array, Array]:
        """Return memory as numbers of a type, and the places [T, count] of an access."""
        size = dtype.itemsize * count
        if (address % np.uint64(size)).any():
            raise KernelError(f"an access of {size} bytes is not aligned")
        if space == "global":
            return self._memory.cells(address, dtype, count)
        if space == "shared":
            return self.shared.cells(address, threads, dtype, count)
        raise NotImplementedError(space)
