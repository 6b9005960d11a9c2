"""The GPU backends: Triton's results against plain torch (interpreted if there is no GPU), the
arguments of flash-attn, and the specs that each backend refuses.
"""

import dataclasses
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.attention.flash_attn import FlashAttnBackend
from nanovllm.attention.selector import select_backend
from nanovllm.attention.spec import AttentionSpec, QKNormRope
from nanovllm.attention.torch_sdpa import TorchBackend, TorchExplicitBackend, explicit_attention
from nanovllm.attention.triton import TritonBackend
from nanovllm.errors import ConfigError
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.kernels.torch_math import NORM_CENTRED, NORM_WIDE
from nanovllm.kernels.triton.kernels import TritonKernels
from nanovllm.layers.rotary_embedding import RotaryEmbedding, inverse_frequencies
from nanovllm.platform import cuda
from nanovllm.platform.cpu import CPU
from nanovllm.worker import attention_groups
from tests.attention.cases import make_case, random_rows
from tests.closeness import assert_close
from tests.kernels.triton.inputs import CUDA, DEVICE, has_fp8
from tests.kernels.triton.interpreter import patch_interpreter

pytestmark = pytest.mark.usefixtures("inference_mode")

FP8 = torch.float8_e4m3fn

patch_interpreter()


def attend(backend, case, batch=None, qk_norm=True, parts=3, **options):
    """Run one attention layer on a random qkv; return its output and the cache after it.

    Args:
        parts: q, k and v; fewer without v, or without k and v.
        options: of `QKNormRope`.
    """
    spec, batch = case.spec, case.batch if batch is None else batch
    generator = torch.Generator().manual_seed(1)
    heads = spec.num_heads + (parts - 1) * spec.num_kv_heads
    qkv = torch.randn(len(case.q), heads * spec.head_dim, generator=generator)
    qkv = qkv[: len(batch.positions)].to(DEVICE, spec.dtype)
    weights = [torch.randn(spec.head_dim, generator=generator) for _ in range(2)]
    weights = [weight.to(DEVICE, spec.dtype) if qk_norm else None for weight in weights]
    rotary = RotaryEmbedding(512, inverse_frequencies(spec.head_dim, 10000.0)).to(DEVICE)
    sinks = torch.randn(spec.num_heads, generator=generator).to(DEVICE) if spec.sinks else None
    norm = QKNormRope(*weights, 1e-6, rotary.cos_sin, **options)
    batch = dataclasses.replace(batch, metadata=backend.plan(batch))
    cache = case.cache.clone()
    return backend.forward(qkv, norm, cache, batch, sinks), cache


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype"),
    [
        (16, 64, torch.float32),
        (64, 72, torch.float16),
        (3, 32, torch.float32),
        (8, 8, torch.float32),
    ],
)
def test_triton_is_torch(block_size, head_dim, dtype):
    """With prompts, chunks after a prefix and single tokens, each kind alone and mixed."""
    mixed = [(min(query, 5), length) for query, length in random_rows(block_size, 10)[:3]]
    for rows in ([(1, 30), (1, 1), (1, 270)], [(9, 9), (5, 40)], [*mixed, (1, 33), (6, 6)]):
        case = make_case(rows, 2, 3, head_dim, block_size, dtype, device=DEVICE)
        qk_norm = block_size != 64
        expected, expected_cache = attend(TorchBackend(case.spec), case, qk_norm=qk_norm)
        out, cache = attend(TritonBackend(case.spec), case, qk_norm=qk_norm)
        tolerance = {torch.float32: 1e-5, torch.float16: 5e-3}[dtype]
        assert_close(out, expected, atol=tolerance, rows=case.token_names())
        # The stored keys and values agree up to rounding; no other cell is written.
        assert_close(cache, expected_cache, atol=4 * tolerance)
        assert ((cache == 1e4) == (expected_cache == 1e4)).all()


@pytest.mark.parametrize(
    ("spec", "parts", "norm"),
    [
        ({"window": 20, "sinks": True, "scale": 0.3}, 3, {"kind": NORM_WIDE, "v_norm": True}),
        ({"window": 300, "softcap": 5.0}, 2, {"kind": NORM_CENTRED}),
        ({"window": 7}, 1, {"after_rotation": True}),
        ({"window": 7, "sees_pictures": True}, 3, {}),
    ],
    ids=str,
)
def test_triton_is_torch_for_other_families(spec, parts, norm):
    """With the same keys and values in the cache if there are only queries. The batch has a picture
    in each row of several tokens, which only the last spec sees.
    """
    case = make_case([(1, 270), (5, 40), (1, 33), (6, 6)], 2, 3, 64, 16, device=DEVICE)
    ends = case.batch.positions.int() + 1
    ends[2:5], ends[7:11] = 39, 4
    case.batch = dataclasses.replace(case.batch, ends=ends)
    case.spec = dataclasses.replace(case.spec, **spec)
    case.cache = case.stored()
    backends = TorchExplicitBackend(case.spec), TritonBackend(case.spec)
    (expected, expected_cache), (out, cache) = (
        attend(backend, case, parts=parts, **norm) for backend in backends
    )
    assert_close(out, expected, atol=2e-5, rows=case.token_names())
    assert_close(cache, expected_cache, atol=4e-5, rtol=1e-5)


# --- flash-attn: without a GPU, plain torch replaces its functions


def as_in_a_graph(batch, num_padding):
    """Return the batch as a CUDA graph holds it: no lengths on the host, a wide block table, and
    `num_padding` last rows of length 0.
    """
    width = batch.block_tables.shape[1] + 5
    tables = torch.full((len(batch.seq_lens), width), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    tables[:, : batch.block_tables.shape[1]] = batch.block_tables
    seq_lens, slots = batch.seq_lens.clone(), batch.slot_mapping.clone()
    if num_padding:
        seq_lens[-num_padding:] = 0
        slots[-num_padding:] = -1
    return dataclasses.replace(
        batch,
        block_tables=tables,
        seq_lens=seq_lens,
        slot_mapping=slots,
        lengths=None,
    )


def attend_pages(q, k, v, query_lens, seq_lens, tables, scale, window, softcap=0.0):
    """Return what the package computes: attention of q [T, heads, dim] over the cache's pages."""
    out = []
    for row, queries in enumerate(q.split(query_lens)):
        if seq_lens[row] == 0:
            out.append(torch.zeros_like(queries))
            continue
        blocks = tables[row, : -(-seq_lens[row] // k.shape[1])].long()
        keys, values = (pages[blocks].flatten(0, 1)[: seq_lens[row]] for pages in (k, v))
        visible = torch.ones(len(queries), seq_lens[row], dtype=torch.bool)
        visible = visible.tril(seq_lens[row] - len(queries))
        if window[0] >= 0:
            visible = visible.triu(seq_lens[row] - len(queries) - window[0])
        heads = (x.transpose(0, 1) for x in (queries, keys, values))
        scale = queries.shape[-1] ** -0.5 if scale is None else scale
        out.append(explicit_attention(*heads, visible, scale, softcap, None).transpose(0, 1))
    return torch.cat(out)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    block_table,
    causal,
    softmax_scale=None,
    window_size=(-1, -1),
    softcap=0.0,
):
    assert causal
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    lengths = cache_seqlens.tolist()
    options = block_table, softmax_scale, window_size, softcap
    return attend_pages(q[:, 0], k_cache, v_cache, [1] * len(q), lengths, *options)[:, None]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    causal,
    block_table,
    softmax_scale=None,
    window_size=(-1, -1),
    softcap=0.0,
):
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    query_lens, seq_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(query_lens), max(seq_lens))
    options = block_table, softmax_scale, window_size, softcap
    return attend_pages(q, k, v, query_lens, seq_lens, *options)


@pytest.mark.skipif(CUDA, reason="the package itself is tested there")
@pytest.mark.parametrize(
    "options", [{}, {"window": 20, "softcap": 5.0}, {"window": 20, "scale": 0.3}], ids=str
)
def test_the_package_is_asked_for_the_right_thing(options, monkeypatch):
    functions = SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    monkeypatch.setitem(sys.modules, "flash_attn", functions)
    for rows in ([(1, 30), (1, 1), (1, 270)], [(9, 9), (7, 40)], [(1, 300), (5, 260), (6, 6)]):
        case = make_case(rows, 2, 3, 32, 256)
        case.spec = dataclasses.replace(case.spec, **options)
        expected, _ = attend(TorchExplicitBackend(case.spec), case)
        out, _ = attend(FlashAttnBackend(case.spec), case)
        assert_close(out, expected, atol=1e-5, rows=case.token_names())
    case = make_case([(1, 30), (1, 270), (1, 2)], 2, 3, 32, 256)
    case.spec = dataclasses.replace(case.spec, **options)
    expected, _ = attend(TorchExplicitBackend(case.spec), case)
    out, _ = attend(FlashAttnBackend(case.spec), case, as_in_a_graph(case.batch, 1))
    assert_close(out[:2], expected[:2], atol=1e-5)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"window": 300, "scale": 0.3}], ids=str)
def test_the_package_is_torch_on_a_gpu(options):
    for rows in ([(1, 30), (1, 1), (1, 270)], [(9, 9), (7, 40)], [(1, 300), (5, 260), (6, 6)]):
        case = make_case(rows, 2, 3, 64, 256, torch.float16, device=DEVICE)
        case.spec = dataclasses.replace(case.spec, **options)
        if (reason := FlashAttnBackend.unsupported(case.spec)) is not None:
            pytest.skip(reason)
        expected, _ = attend(TorchExplicitBackend(case.spec), case)
        out, _ = attend(FlashAttnBackend(case.spec), case)
        assert_close(out, expected, atol=5e-3, rows=case.token_names())


# --- refusals and selection


@pytest.fixture
def a_gpu(monkeypatch):
    """Pretend that there is a GPU; return a spec that every GPU backend supports."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), None)


@pytest.mark.parametrize(
    ("backend_class", "changes", "reason"),
    [
        (TritonBackend, {"dtype": torch.float64}, "no kernel for float64"),
        (TritonBackend, {"head_dim": 76}, "head_dim 76 is no multiple of 8"),
        (TritonBackend, {"head_dim": 528}, "head_dim 528 is no multiple of 8 up to 512"),
        (TritonBackend, {"head_dim": 272, "dtype": torch.float32}, "takes too many registers"),
        (TritonBackend, {"device": torch.device("meta")}, "needs a CUDA GPU"),
        *(
            (FlashAttnBackend, changes, reason)
            for changes, reason in (
                ({"device": torch.device("cpu")}, "needs a CUDA GPU"),
                ({"dtype": torch.float32}, "needs float16 or bfloat16, not float32"),
                ({"head_dim": 100}, "head_dim 100 is no multiple of 8"),
                ({"head_dim": 512}, "head_dim 512 is no multiple of 8 up to 256"),
                ({"sinks": True}, "has no attention sinks"),
                ({"sees_pictures": True}, 'for text alone, set limit_mm_per_prompt={"image": 0}'),
                ({"block_size": 64}, "kvcache_block_size 64 is no multiple of 256"),
                ({"kv_dtype": FP8}, "keeps keys and values in the model's dtype"),
            )
        ),
    ],
)
def test_refusals(backend_class, changes, reason, a_gpu):
    assert reason in backend_class.refusal(dataclasses.replace(a_gpu, **changes))


GPU = cuda.CUDA(torch.device("cuda", 0))


def test_an_old_gpu_is_refused(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert FlashAttnBackend.unsupported(a_gpu) == "compute capability 7.5 is below 8.0"


def test_an_fp8_cache_needs_a_gpu_that_has_it(a_gpu, monkeypatch):
    spec = dataclasses.replace(a_gpu, kv_dtype=FP8)
    assert isinstance(select_backend(spec, GPU.attention_backends(TritonKernels())), TritonBackend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    rule = r"needs a GPU of compute capability 8.9 .*triton: compute capability 8.6 is below 8.9"
    with pytest.raises(ConfigError, match=rule):
        select_backend(spec, GPU.attention_backends(TritonKernels()))


def test_flash_attn_that_is_absent_or_broken_is_refused(a_gpu, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    reason = "the flash-attn package is not installed"
    assert FlashAttnBackend.unsupported(a_gpu) == reason
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')")
    reason = "the flash-attn package cannot be imported: undefined symbol"
    assert FlashAttnBackend.unsupported(a_gpu) == reason


def test_the_choice_on_a_gpu_and_what_the_log_says(a_gpu, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "nanovllm")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert isinstance(select_backend(a_gpu, GPU.attention_backends(TritonKernels())), TritonBackend)
    assert "triton; flash-attn: the flash-attn package" in caplog.text
    assert isinstance(select_backend(a_gpu, GPU.attention_backends(TORCH)), TorchBackend)
    odd = dataclasses.replace(a_gpu, head_dim=72)
    assert isinstance(select_backend(odd, GPU.attention_backends(TritonKernels())), TritonBackend)
    odd = dataclasses.replace(a_gpu, head_dim=76)
    assert isinstance(select_backend(odd, GPU.attention_backends(TritonKernels())), TorchBackend)
    assert "triton: head_dim 76 is no multiple of 8 up to 512" in caplog.text


def test_triton_serves_a_cpu_only_interpreted(a_gpu, monkeypatch):
    spec = dataclasses.replace(a_gpu, device=torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend.unsupported(spec) is None
    platform = CPU()
    chosen = select_backend(spec, platform.attention_backends(platform.kernels(spec.dtype)))
    assert not isinstance(chosen, TritonBackend), "too slow to be chosen"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert TritonBackend.unsupported(spec) == "needs a CUDA GPU"


# --- the engine


class RoundingBackend(TorchBackend):
    """Plain torch with keys and values rounded to FP8."""

    def store(self, qkv, norm, kv_cache, batch):
        q = super().store(qkv, norm, kv_cache, batch)
        slots = kv_cache.flatten(1, 2)[:, batch.slot_mapping]
        kv_cache.flatten(1, 2)[:, batch.slot_mapping] = slots.to(FP8).to(q.dtype)
        return q


@has_fp8
def test_the_engine_with_an_fp8_cache(monkeypatch):
    """A block takes a quarter of float32's bytes; log-probabilities are those of rounded KV."""
    pools = []

    def logprobs(backend, **options):
        monkeypatch.setattr(attention_groups, "select_backend", lambda spec, kernels: backend(spec))
        llm = LLM(
            demo_model.MODEL,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=1000,
            native_kernels=False,
            kvcache_block_size=16,
            kv_cache_memory_bytes=2**21,
            **options,
        )
        try:
            pools.append(llm.engine.executor._runner.network.attention.layers[0].kv_cache)
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
            output = llm.generate("A block table maps", params, use_tqdm=False)[0]
            return output.token_ids, output.outputs[0].cumulative_logprob
        finally:
            llm.shutdown()

    expected, narrow = logprobs(RoundingBackend), logprobs(TritonBackend, kv_cache_dtype="fp8")
    assert (pools[0].dtype, pools[1].dtype) == (torch.float32, FP8)
    assert pools[1].shape[1] == 4 * pools[0].shape[1]
    assert narrow[0] == expected[0]
    assert narrow[1] == pytest.approx(expected[1], abs=0.05)
