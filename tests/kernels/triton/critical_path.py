"""Counts the clocks of a compiled kernel's longest path, without a GPU.

    python -m tests.kernels.triton.critical_path

prints them for the kernels of a fused layer at the shape of Qwen3-0.6B.

The machine code says of each instruction how long the next one has to wait, and which results it
waits for itself (Jia et al., arXiv 1804.06826, section 2.1). The latencies of loads, shuffles and
the like are not in the code: `_LATENCIES` assumes them. A program has an SM to itself and its
warps keep in step. Global loads find their data in the L2 cache. Each loop runs once. So this shows
what a chain of dependences costs. It knows neither bandwidth nor other programs.
"""

import copy
import dataclasses
import itertools
import re
import subprocess
import tempfile
from typing import Any

from tests.kernels.triton import harness

_LATENCIES = {
    "LDG": 280, "LDGSTS": 280, "ATOMG": 700, "MEMBAR": 500, "LDS": 30, "LDSM": 33, "STS": 25,
    "STSM": 33, "SHFL": 25, "REDUX": 25, "MUFU": 22, "S2R": 30, "S2UR": 30, "R2UR": 14, "LDC": 45,
    "I2F": 20, "F2I": 20, "POPC": 20, "FLO": 20,
}  # fmt: skip
"""Clocks from the issue of an instruction to its result, where the code does not say."""
_OTHER_LATENCY = 15
_READ_LATENCY = 12
"""Clocks until an instruction has read its operands, which may then be overwritten."""
_BARRIER = 20
"""Clocks of a barrier of a program's warps that arrive together."""
_NONE = 7
"""The number of no scoreboard."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction and its control bits."""

    predicate: str
    name: str
    """Without its suffixes."""
    text: str
    stall: int
    """Clocks until the next instruction may be issued."""
    write: int
    """The scoreboard that is raised until the result is there."""
    read: int
    """The scoreboard that is raised until the operands have been read."""
    waits: int
    """A bit for each scoreboard that must not be raised."""
    target: int | None = None
    """Index of the instruction to which a branch goes."""


@dataclasses.dataclass
class _State:
    """Clocks of one path through a kernel."""

    now: int = 0
    start: int = 0
    """When the previous kernel had ended."""
    scoreboards: list[int] = dataclasses.field(default_factory=lambda: [0] * 8)
    """When each one falls."""
    copied: int = 0
    """When the asynchronous copies issued so far are done."""
    groups: list[int] = dataclasses.field(default_factory=list)
    """When each group of asynchronous copies is done."""

    def issue(self, instruction: Instruction) -> None:
        for board in range(6):
            if instruction.waits >> board & 1:
                self.now = max(self.now, self.scoreboards[board])
        waited = re.search(r"SB\d, 0x(\w+)", instruction.text)
        if instruction.name == "DEPBAR" and waited:
            done = self.groups[: len(self.groups) - int(waited[1], 16)]
            self.now = max([self.now, *done])
        elif instruction.name == "ACQBULK":
            self.start = self.now
        elif instruction.name == "BAR":
            self.now += _BARRIER
        done_at = self.now + _LATENCIES.get(instruction.name, _OTHER_LATENCY)
        if instruction.name == "LDGSTS":
            self.copied = max(self.copied, done_at)
        elif instruction.name == "LDGDEPBAR":
            self.groups.append(self.copied)
        elif instruction.write != _NONE:
            self.scoreboards[instruction.write] = max(self.scoreboards[instruction.write], done_at)
        if instruction.read != _NONE:
            self.scoreboards[instruction.read] = max(
                self.scoreboards[instruction.read], self.now + _READ_LATENCY
            )
        self.now += max(instruction.stall, 1)


def longest_path(kernel: Any) -> int:
    """Return the clocks of a compiled kernel, from its wait for the previous one if it waits."""
    return _longest(_disassemble(kernel.asm["cubin"]), 0, _State())


def _longest(code: list[Instruction], index: int, state: _State) -> int:
    """Return the clocks of the longest path from `index` on. Forward branches go both ways."""
    while True:
        instruction = code[index]
        state.issue(instruction)
        target, always = instruction.target, not instruction.predicate
        if always and (instruction.name == "EXIT" or (target is not None and target <= index)):
            return state.now - state.start
        index += 1
        if target is not None and target > index:
            if always:
                index = target
                continue
            jumped = _longest(code, target, copy.deepcopy(state))
            return max(jumped, _longest(code, index, state))


def _disassemble(cubin: bytes) -> list[Instruction]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", "-hex", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    lines = listing.splitlines()
    for line, following in itertools.pairwise(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        # The upper half of the 128 bits is on a line of its own.
        if found := re.match(r"\s+/\*\w{4,}\*/\s+(.*?) *;\s+/\* 0x\w{16} \*/", line):
            code.append(_decode(found[1], int(following.split("0x")[1][:16], 16) >> 41))
    return [_with_target(instruction, labels) for instruction in code]


def _decode(text: str, control: int) -> Instruction:
    predicate, operation = re.match(r"(@!?U?P\w+)?\s*(\S+)", text).groups()  # type: ignore[union-attr]
    fields = {"stall": 15, "yield": 1, "write": 7, "read": 7, "waits": 63}
    bits = {}
    for name, mask in fields.items():
        bits[name] = control & mask
        control >>= mask.bit_length()
    del bits["yield"]
    return Instruction(predicate or "", operation.split(".")[0], text, **bits)


def _with_target(instruction: Instruction, labels: dict[str, int]) -> Instruction:
    label = re.search(r"`\((\.L_x_\d+)\)", instruction.text)
    # BRA.DIV goes where the threads of a warp have parted, which they never do here.
    if instruction.name != "BRA" or not label or "BRA.DIV" in instruction.text:
        return instruction
    return dataclasses.replace(instruction, target=labels[label[1]])


def paths_of_launches(function: Any, *args: object, arch: int = 90) -> list[tuple[str, int]]:
    """Return name and longest path of the kernels that `function` launches. No kernel runs.

    Call it in a process without TRITON_INTERPRET.
    """
    launched = harness._launched(function, *args, arch=arch)
    return [(kernel.name, longest_path(kernel)) for kernel in launched]


def _main() -> None:
    import torch

    from tests.kernels.triton.test_fused_compile import QWEN3, layer

    harness._compile_kernels()
    for rows in (1, 4, 16):
        for name, clocks in paths_of_launches(layer, QWEN3, rows, torch.bfloat16, True):
            print(f"{rows:2} rows  {name:16} {clocks:5} clocks")  # noqa: T201


if __name__ == "__main__":
    _main()
