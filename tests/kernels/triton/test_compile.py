"""The kernels of layers and of the sampler compile for GPUs that are not present. At Qwen3's shapes
they spill no register.
"""

import pytest
import torch

from nanovllm.kernels.torch_math import NORM_CENTRED, NORM_WIDE
from nanovllm.kernels.triton import ops as triton_ops, sampling as triton_sampling
from nanovllm.kernels.triton.store import store
from tests.kernels.triton.harness import ARCHS, FP8_ARCHS, compile_for, compile_launches

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEAD_DIM, VOCAB_SIZE = 128, 151936


def archs_of(dtype):
    """Return for which GPUs a test compiles: with bfloat16, for each."""
    return ARCHS if dtype == torch.bfloat16 else [90]


def meta(*shape, dtype=torch.int64):
    return torch.empty(*shape, dtype=dtype, device="meta")


def assert_fits(compiled, *names):
    """Check the kernels that `compile_launches` returned: `names` on each architecture."""
    for kernels in compiled.values():
        assert [kernel.name for kernel in kernels] == list(names)
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert 0 < kernel.n_regs <= 128, kernel


@pytest.mark.parametrize(
    ("hidden_size", "dtype"), [(1024, torch.float16), (1024, torch.float32), (5120, torch.bfloat16)]
)
def test_add_rms_norm(hidden_size, dtype):
    rows, weight = meta(3, hidden_size, dtype=dtype), meta(hidden_size, dtype=dtype)
    norms = [(triton_ops.add_rms_norm, x, rows, weight, 1e-6) for x in (rows, None)]
    assert_fits(compile_launches(*norms, archs=archs_of(dtype)), "_add_rms_norm", "_add_rms_norm")


@pytest.mark.parametrize(
    ("heads", "dtype"), [((64, 8, True), torch.bfloat16), ((32, 8, False), torch.float16)]
)
def test_store(heads, dtype):
    num_heads, num_kv_heads, qk_norm = heads
    weight = meta(HEAD_DIM, dtype=dtype) if qk_norm else None
    index = meta(3, dtype=torch.int64)
    qkv = meta(3, (num_heads + 2 * num_kv_heads) * HEAD_DIM, dtype=dtype)
    cos_sin = meta(40960, HEAD_DIM, dtype=torch.float32)
    for kv_dtype, possible in ((dtype, ARCHS), (torch.float8_e4m3fn, FP8_ARCHS)):
        archs = [arch for arch in possible if arch in archs_of(dtype)]
        kv_cache = meta(2, 5000, 256, num_kv_heads, HEAD_DIM, dtype=kv_dtype)
        args = (qkv, weight, weight, 1e-6, cos_sin, index, index, kv_cache, num_heads)
        assert_fits(compile_launches((store, *args), archs=archs), "_store")


def launch_store_of_gemma(dtype):
    """The store of Gemma 4's layers with full attention, whose keys are the values."""
    index, weight = meta(3, dtype=torch.int64), meta(512, dtype=dtype)
    cos_sin = meta(40960, 512, dtype=torch.float32)
    cache = meta(2, 5000, 64, 2, 512, dtype=dtype)
    norm = weight, weight, 1e-6, cos_sin
    options = {"kind": NORM_WIDE, "v_norm": True, "q_scale": meta(40960, dtype=torch.float32)}
    store(meta(3, 18 * 512, dtype=dtype), *norm, index, index, cache, 16, **options)


def launch_ops(dtype):
    x, rows = meta(3, 2304, dtype=dtype), meta(3, 4608, dtype=dtype)
    triton_ops.add_rms_norm(x, x, meta(2304, dtype=dtype), 1e-6, NORM_CENTRED, 0.22)
    triton_ops.rms_norm(rows[:, :256], None, 1e-6)
    triton_ops.add_layer_norm(x, x, x[0], x[0], 1e-6)
    triton_ops.act_and_mul(rows)
    triton_ops.act_and_mul(rows, "swiglu_oai")
    triton_ops.mul_act(rows[:, :256], rows[:, 256:512], "sigmoid")
    triton_ops.act(rows, "gelu")
    triton_ops.act(rows, "relu2")


def test_what_other_families_need():
    call = launch_store_of_gemma, torch.bfloat16
    assert_fits(compile_launches(call, archs=[90]), "_store")
    compiled = compile_launches((launch_ops, torch.bfloat16), archs=[90])
    assert_fits(compiled, "_add_rms_norm", "_add_rms_norm", "_add_layer_norm", *["_mul_act"] * 5)


def test_sampling():
    logits = meta(3, VOCAB_SIZE, dtype=torch.bfloat16)
    index, number = meta(3, dtype=torch.int64), meta(3, dtype=torch.float32)
    compiled = compile_launches(
        (triton_sampling.sample, logits, number, index, index, index, number, number),
        (triton_sampling.greedy, logits),
        archs=[90],
    )
    sample, greedy = (
        ("_reduce_blocks", "_weigh_chunks", "_choose"),
        ("_reduce_blocks", "_choose"),
    )
    assert_fits(compiled, *sample, *greedy)


def test_spilled_registers_are_counted():
    """Compile a kernel twice, once with too few registers."""
    pointers = dict.fromkeys(("x", "residual", "weight", "out"), "*bf16:16")
    numbers = dict.fromkeys(("residual_stride", "out_stride", "size"), "i32:16")
    signature = {**pointers, **numbers, "eps": "fp32"}
    fits, spills = (
        compile_for(
            triton_ops._add_rms_norm, signature, {"BLOCK": 4096}, 90, num_warps=4, maxnreg=n
        )
        for n in (128, 24)
    )
    assert fits.n_spills == 0
    assert spills.n_spills > 0
