"""The kernels of fused steps compile for GPUs that are not present: at the shapes of Qwen3-0.6B and
Llama-3-8B they spill no register. Before it waits, a chained one reads only what none stores.
"""

import re

import pytest
import torch

from nanovllm.kernels.triton import fused_attention, fused_layer
from tests.kernels.triton import harness
from tests.kernels.triton.harness import SHARED, compile_launches
from tests.kernels.triton.test_compile import meta

BF16, F32 = torch.bfloat16, torch.float32
# hidden size, intermediate size, heads, vocabulary, whether q and k have norms
QWEN3, LLAMA = (1024, 3072, 16, 151936, True), (4096, 14336, 32, 128256, False)
KV_HEADS, HEAD_DIM = 8, 128
NAMES = [
    *("_norm_linear", "_attend_rows", "_linear_partials"),
    *("_norm_linear", "_linear_partials", "_norm_linear"),
]


READ_EARLY = {
    "_norm_linear": {"weight", "norm_weight"},
    "_linear_partials": {"weight"},
    "_attend_rows": {
        "positions",
        "angle_rows",
        "slot_mapping",
        "block_tables",
        "k_cache",
        "v_cache",
    },
}


def layer(model, rows, dtype, chained):
    """Launch the five kernels of a layer, then the head's."""
    hidden, intermediate, heads, vocab_size, qk_norm = model
    x, norm = meta(rows, hidden, dtype=dtype), meta(hidden, dtype=dtype)
    width = (heads + 2 * KV_HEADS) * HEAD_DIM

    def norm_linear(partials, outputs, gated=False):
        weight = meta(outputs, hidden, dtype=dtype)
        return fused_layer.norm_linear(
            x, partials, None, norm, 1e-6, weight, None, gated=gated, chained=chained
        )[0]

    def partials(inputs):
        weight = meta(hidden, inputs.shape[1], dtype=dtype)
        return fused_layer.linear_partials(inputs, weight, chained=chained)

    qkv = norm_linear(meta(2, rows, hidden, dtype=F32), width)
    index, qk_norm_rope = meta(rows, dtype=torch.int64), meta(HEAD_DIM, dtype=dtype)
    done = meta(fused_layer.MAX_ROWS, KV_HEADS, dtype=torch.int32)
    attended = fused_attention.attend_rows(
        qkv, *[qk_norm_rope if qk_norm else None] * 2, 1e-6, meta(40960, HEAD_DIM, dtype=F32),
        index, index, index, meta(rows, 640, dtype=torch.int32),
        meta(2, 1000, 64, KV_HEADS, HEAD_DIM, dtype=dtype), heads, done, chained=chained,
    )  # fmt: skip
    product = norm_linear(partials(attended.flatten(1)), intermediate * 2, gated=True)
    norm_linear(partials(product), vocab_size)


@pytest.mark.parametrize(
    ("model", "rows", "dtype", "archs"),
    [
        (QWEN3, 4, BF16, [80]),
        pytest.param(QWEN3, 1, BF16, [90], marks=pytest.mark.long),
        pytest.param(LLAMA, 4, BF16, [90], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_no_spills(model, rows, dtype, archs):
    compiled = compile_launches((layer, model, rows, dtype, archs[0] >= 90), archs=archs)
    assert list(compiled) == archs
    for arch, kernels in compiled.items():
        assert [kernel.name for kernel in kernels] == NAMES
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert kernel.shared <= SHARED[arch] * 1024, kernel


def wide_linear(rows):
    """Launch the output projection of Llama-3-70B: 32 outputs a program, in several tiles."""
    x, weight = meta(rows, 8192, dtype=BF16), meta(8192, 8192, dtype=BF16)
    fused_layer.linear_partials(x, weight, chained=True)


def test_a_wide_linear_spills_no_register():
    for rows in (1, 4):
        (kernel,) = compile_launches((wide_linear, rows), archs=[90])[90]
        assert kernel.n_spills == 0, kernel


def code_of(kind, function, *case):
    """Return the code of the kernels that `function` launches, each with the names and types of its
    parameters; called in a child process of the harness.

    Args:
        kind: "ptx", or "ttgir", which has the layout of each tensor.
    """

    def code_and_parameters(compiled, _):
        parameters = compiled.src.signature.items()
        return compiled.asm[kind], [item for item in parameters if item[1] != "constexpr"]

    resources = harness._resources
    harness._resources = code_and_parameters
    try:
        *call, arch = case
        return harness._compile_launches(function, *call, arch=arch)
    finally:
        harness._resources = resources


def in_child(kind, *args, function=layer):
    return harness._children().submit(code_of, kind, function, *args).result()


def pointers_read(ptx, parameters):
    """Return the names of the pointers from which the addresses of global loads are computed."""
    sources, found = {}, set()  # of each register, the parameters that it was computed from
    for line in ptx.splitlines():
        operands = re.findall(r"%\w+|_param_\d+", line.partition("//")[0])
        index = re.search(r"_param_(\d+)\]", line)
        if "ld.global" in line:
            found |= sources.get(re.search(r"\[ *(%\w+)", line)[1], set())
        elif index:
            sources[operands[0]] = {int(index[1])}
        elif operands:
            sources[operands[0]] = set().union(*(sources.get(x, set()) for x in operands[1:]))
    pointers = [name if type.startswith("*") else None for name, type in parameters]
    return {pointers[index] for index in found} - {None}


@pytest.mark.parametrize("arch", [90])
def test_what_is_touched_before_the_wait(arch):
    """Only what the previous kernel does not store: weights, metadata, and keys and values
    of earlier steps.
    """
    for name, (code, parameters) in zip(
        NAMES, in_child("ptx", QWEN3, 4, BF16, True, arch), strict=True
    ):
        before, wait, after = code.partition("griddepcontrol.wait")
        assert wait
        assert "griddepcontrol.wait" not in after
        assert "griddepcontrol.launch_dependents" in before
        assert not re.search(r"(st|atom|red)\.global|cp\.async", before)
        assert pointers_read(before, parameters) == READ_EARLY[name]
        assert pointers_read(code, parameters) > READ_EARLY[name]


def test_unchained_kernels_do_not_wait():
    for code, _ in in_child("ptx", QWEN3, 4, BF16, False, 80):
        assert "griddepcontrol" not in code


def test_a_row_has_the_same_bits_in_any_batch():
    """Whatever the number of rows, the same threads sum the same squares, the tensor cores multiply
    with the same instruction, and each warp has a part of the inputs or of the keys.
    """
    layouts, products = set(), set()
    for rows in (1, 4):
        for code, _ in in_child("ttgir", QWEN3, rows, BF16, True, 90):
            named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
            of_sums = re.findall(rf"\}}\) : \(tensor<{rows}x1024xf32, (#\w+)>\)", code)
            layouts |= {named[layout] for layout in of_sums}
            products |= set(re.findall(r"warpsPerCTA = (\[.*\]), instrShape = (\[.*\])", code))
    assert len(layouts) == 1
    assert "warpsPerCTA = [1, 8]" in layouts.pop()
    assert products == {("[8, 1, 1]", "[1, 16, 8]"), ("[4, 1, 1]", "[1, 16, 8]")}
