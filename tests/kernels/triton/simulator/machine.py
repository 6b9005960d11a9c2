"""Threads of a kernel's programs, in step as far as their branches allow: registers, control flow,
barriers and memory.

A register is an array with a number for each thread. An access outside of the arguments' memory, an
unaligned one, and a missing barrier between accesses of shared memory are errors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.triton.simulator import arithmetic
from tests.kernels.triton.simulator.arithmetic import Array
from tests.kernels.triton.simulator.parser import Address, Instruction, Kernel, Operand

WARP = 32
SHARED_BASE = 1024
"""The address of shared memory. Swizzled layouts need a multiple of 1024."""
_RUNNING, _WAITING, _ENDED = range(3)
_MANY = 63
"""In place of a warp's number: several warps."""

Step = Callable[["Machine", Array], None]
"""Runs an instruction for the threads of a mask."""


class KernelError(AssertionError):
    """A kernel did what a GPU does not allow, or does not define."""


class _Copies(NamedTuple):
    """Asynchronous copies to shared memory that one instruction has begun."""

    size: int
    """Bytes of each."""
    group: Array
    """The group of each thread's copy; -1: it has none, or has waited for it."""
    target: Array
    """Their addresses in shared memory."""


class GlobalMemory:
    """The memory of this process, as far as it belongs to the arguments of a kernel.

    Args:
        areas: address and bytes of each.
    """

    def __init__(self, areas: Sequence[tuple[int, int]]) -> None:
        areas = sorted({area for area in areas if area[0]})  # without tensors on the meta device
        self._starts = np.array([0, *(start for start, _ in areas)], np.uint64)
        self._stops = np.array([0, *(start + size for start, size in areas)], np.uint64)

    def view(self, dtype: np.dtype[Any]) -> Array:
        """Return all of memory as numbers of a type, from address 0 on."""
        interface = {"data": (dtype.itemsize, False), "shape": (2**47 // dtype.itemsize,)}
        whole = type("Whole", (), {})()
        whole.__array_interface__ = interface | {"typestr": dtype.str, "version": 3}
        return np.asarray(whole)

    def check(self, address: Array, size: int) -> None:
        """Raise an error for an access of `size` bytes outside of the arguments."""
        area = np.searchsorted(self._starts, address, "right") - 1
        stop = self._stops[area]
        outside = (address >= stop) | (stop - address < size)
        if outside.any():
            raise KernelError(f"{outside.sum()} accesses lie outside of the arguments' memory")


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
        self.memory, self._shared_bytes = memory, shared_bytes
        self._parameters = parameters
        self._branches = frozenset(kernel.labels.values())
        self.program_size = kernel.num_threads
        count = len(programs)
        thread = np.tile(np.arange(self.program_size, dtype=np.uint32), count)
        self.registers: dict[str, Array] = {"%tid.x": thread, "%laneid": thread % WARP}
        for axis, name in enumerate("xyz"):
            number = np.repeat(programs[:, axis].astype(np.uint32), self.program_size)
            self.registers[f"%ctaid.{name}"] = number
            self.registers[f"%nctaid.{name}"] = np.uint32(grid[axis])  # type: ignore[assignment]
        self.pc = np.zeros(len(thread), np.int32)
        self.state = np.zeros(len(thread), np.uint8)
        size = -(-shared_bytes // 128) * 128
        self._shared = np.full((count, size), 255, np.uint8)
        self._epoch = np.zeros(count, np.int32)  # barriers that the program has passed
        # Of each byte of shared memory: the epoch and the warp of the last write and reads.
        self._written = np.full((count, size), -1, np.int32)
        self._read = np.full((count, size), -1, np.int32)
        self._in_flight = np.zeros((count, size), bool)  # bytes that asynchronous copies write
        self._copies: list[_Copies] = []
        self.copy_group = np.zeros(len(thread), np.int32)  # to which a new copy belongs
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
        self._epoch += by_program.max(1) >= 0
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
        self.copy_group = self.copy_group[threads]
        self._shared, self._epoch = self._shared[live], self._epoch[live]
        self._written, self._read = self._written[live], self._read[live]
        self.has_waited = self.has_waited[threads]
        self._in_flight = self._in_flight[live]
        self._copies = [
            _Copies(copies.size, copies.group[threads], copies.target[threads])
            for copies in self._copies
        ]

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
        if space == "shared":
            self._note_reads(_bytes(index, np.dtype(dtype).itemsize), threads)
        return cells[index]

    def store(self, space: str, address: Array, threads: Array, numbers: Array) -> None:
        """Write [T, count] numbers to memory."""
        cells, index = self.cells(space, address, threads, numbers.dtype, numbers.shape[1])
        if space == "shared":
            self._note_writes(_bytes(index, numbers.itemsize), threads)
        else:
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
            self.memory.check(address, size)
            first = address // np.uint64(dtype.itemsize) - np.uint64(1)
            return self.memory.view(dtype), first[:, None] + np.arange(count, dtype=np.uint64)
        if space != "shared":
            raise NotImplementedError(space)
        place = self._places(address, threads, size)[:, None] // dtype.itemsize
        return self._shared.reshape(-1).view(dtype), place + np.arange(count)

    def _places(self, address: Array, threads: Array, size: int) -> Array:
        """Return the places in shared memory of accesses of `size` bytes."""
        place = address.astype(np.int64) - SHARED_BASE
        if ((place < 0) | (place + size > self._shared_bytes)).any():
            raise KernelError("an access lies outside of shared memory")
        return place + threads // self.program_size * self._shared.shape[1]

    def _stamps(self, threads: Array) -> Array:
        """Return epoch and warp of each thread as one number [T, 1]."""
        program = threads // self.program_size
        stamps = self._epoch[program] * 64 + threads % self.program_size // WARP
        return stamps[:, None]

    def _note_reads(self, place: Array, threads: Array) -> None:
        """Raise an error for bytes [T, n] that another warp has written since the last barrier,
        that a copy may still write, or that nothing has written.
        """
        stamps, written = self._stamps(threads), self._written.reshape(-1)[place]
        if (written == -1).any():
            raise KernelError("shared memory is read that nothing has written")
        if (self._in_flight.reshape(-1)[place]).any():
            raise KernelError("a copy is read that its thread has not waited for")
        if _by_another(written, stamps).any():
            raise KernelError("a warp reads what another one wrote, with no barrier between them")
        _note(self._read, place, stamps)

    def _note_writes(self, place: Array, threads: Array) -> None:
        """Raise an error for bytes [T, n] that another warp has used since the last barrier."""
        stamps = self._stamps(threads)
        for verb, earlier in (("read", self._read), ("wrote", self._written)):
            if _by_another(earlier.reshape(-1)[place], stamps).any():
                raise KernelError(f"a warp overwrites what another one {verb}, with no barrier")
        _note(self._written, place, stamps)

    # Asynchronous copies.

    def begin_copies(self, target: Array, size: int, mask: Array) -> None:
        """Note copies of `size` bytes of the threads of `mask`, which are in flight now."""
        threads = np.flatnonzero(mask)
        self._in_flight.reshape(-1)[self._target_bytes(target, size, threads)] = True
        self._copies.append(_Copies(size, np.where(mask, self.copy_group, -1), target))

    def finish_copies(self, mask: Array, open_groups: int) -> None:
        """Let the threads of `mask` wait until only their last `open_groups` groups are in flight.

        What the copies wrote counts as written now.
        """
        for copies in self._copies:
            done = mask & (copies.group >= 0) & (copies.group < self.copy_group - open_groups)
            threads = np.flatnonzero(done)
            copies.group[done] = -1
            place = self._target_bytes(copies.target, copies.size, threads)
            self._in_flight.reshape(-1)[place] = False
            _note(self._written, place, self._stamps(threads))
        self._copies = [copies for copies in self._copies if (copies.group >= 0).any()]

    def _target_bytes(self, target: Array, size: int, threads: Array) -> Array:
        return self._places(target[threads], threads, size)[:, None] + np.arange(size)


def _by_another(earlier: Array, stamps: Array) -> Array:
    """Return where an access of another warp in the same epoch left the stamp `earlier`."""
    return (earlier // 64 == stamps // 64) & (earlier != stamps)


def _note(cells: Array, place: Array, stamps: Array) -> None:
    """Leave stamps [T, 1] at `place` [T, n], or that several warps have been there."""
    cells = cells.reshape(-1)
    many = np.broadcast_to(stamps // 64 * 64 + _MANY, place.shape)
    new = np.where(_by_another(cells[place], stamps), many, stamps)
    cells[place] = new
    lost = cells[place] != new  # to another warp with the same place
    cells[place[lost]] = many[lost]


def _bytes(index: Array, itemsize: int) -> Array:
    """Return the places of the bytes of numbers [T, count]."""
    if itemsize == 1:
        return index
    place = index[:, :, None] * itemsize + np.arange(itemsize)
    return place.reshape(len(index), index.shape[1] * itemsize)
