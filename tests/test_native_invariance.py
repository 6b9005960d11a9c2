"""With the C kernels, a request's bits do not depend on its batch: what `nanovllm prove` checks."""

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.apps.prove import ProveOptions
from nanovllm.apps.prove.proof import SAME, Prover
from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu import library as library_module
from nanovllm.kernels.cpu.library import library
from tests.checkpoints import FAMILIES
from tests.helpers import random_prompt, token_ids
from tests.lora.adapters import linears_of, write_adapter

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here")

MAX_MODEL_LEN = 256
NUM_REQUESTS = 32
NUM_PROVED = 5
ONE_KV = {"kv_cache_dtype": "auto"}
"""Otherwise `nanovllm prove` has KV caches of 8 and 4 bits, too."""


MODEL: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(shared_checkpoint: Callable[..., str]) -> str:
    return shared_checkpoint(**MODEL)


@pytest.fixture(scope="module", params=FAMILIES)
def each_model(request: pytest.FixtureRequest, shared_checkpoint: Callable[..., str]) -> str:
    """The model in each family, with and without q/k norm and biases."""
    return shared_checkpoint(**MODEL, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(0)
    shared = random_prompt(rng, 100)
    prompts = []
    for _ in range(NUM_REQUESTS):
        start = shared[: rng.choice([0, 0, 32, 64, 100])]
        prompts.append(start + random_prompt(rng, rng.randint(1, 60)))
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            top_k=20 * (i % 4 // 2),
            seed=i,
            max_tokens=rng.randint(1, 30),
        )
        for i in range(NUM_REQUESTS)
    ]
    return prompts, params


def generate(model: str, workload: Any, **options: Any) -> list[list[int]]:
    llm = LLM(model, **{"max_model_len": MAX_MODEL_LEN, **options}, device="cpu")
    assert llm.engine.executor._runner.network.backend.name == "cpu"  # type: ignore[attr-defined]
    try:
        return token_ids(llm.generate(*workload, use_tqdm=False))
    finally:
        llm.shutdown()


def assert_same_bits(
    model: str,
    ways: tuple[str, ...],
    full: bool = False,
    lora_modules: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Check that requests have the same bits alone and in these ways of `nanovllm prove`."""
    prove = ProveOptions(ways=ways, full=full, num_requests=NUM_PROVED, lora_modules=lora_modules)
    options = {"max_model_len": MAX_MODEL_LEN, "device": "cpu", **options}
    proof = Prover(model, options, prove).prove()
    assert proof.holds, proof.difference
    assert not [text for text in proof.not_tried if any(way in text for way in ways)]
    assert {verdict.status for verdict in proof.verdicts} == {SAME}  # none is not shown


FEW = ("chunks of 17",)
CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    # Also with KV caches of 8 and 4 bits.
    *((family, ("batches of 64", *FEW, "call by call", "preempted"), {}) for family in FAMILIES),
    # Weights of 8 and 4 bits beside biases: llama has all, qwen2 those of q, k and v.
    ("llama", FEW, {"quantization": "int8", **ONE_KV}),
    ("qwen2", FEW, {"quantization": "int4", **ONE_KV}),
    # These are about batches and blocks, which no family sees.
    ("qwen3", ("batches of", "chunks of 1"), {"full": True, "kvcache_block_size": 32, **ONE_KV}),
    ("qwen3", FEW, {"quantization": "w8a8", **ONE_KV}),
    ("qwen3", ("call by call",), {"quantization": "int8", **ONE_KV}),
    ("qwen3", ("batches of 5", "call by call"), {"quantization": "int4", "kv_cache_dtype": "int8"}),
]


@pytest.mark.parametrize(("each_model", "ways", "options"), CASES, indirect=["each_model"])
def test_bits_do_not_depend_on_the_batch(
    each_model: str,
    ways: tuple[str, ...],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "nanovllm")
    assert_same_bits(each_model, ways, **options)
    assert "attention backend: cpu" in caplog.text
    assert "run call by call" not in caplog.text


def test_bits_do_not_depend_on_adapters_or_tiers(model: str, tmp_path: Path) -> None:
    linears = linears_of(model)
    paths = [write_adapter(tmp_path / str(seed), linears, seed=seed) for seed in range(2)]
    adapters = tuple(f"a{seed}={path}" for seed, path in enumerate(paths))
    assert_same_bits(model, ("adapters", "KV in"), lora_modules=adapters, **ONE_KV)


def test_rows_behind_one_prompt_share_its_blocks(shared_checkpoint: Callable[..., str]) -> None:
    model = shared_checkpoint(**{**MODEL, "max_position_embeddings": 600})
    rng = random.Random(1)
    prompt = random_prompt(rng, 530)
    prompts = [prompt + random_prompt(rng, rng.randint(1, 20)) for _ in range(16)]
    params = [SamplingParams(seed=i, max_tokens=6) for i in range(16)]
    alone: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
    expected = generate(model, (prompts, params), max_model_len=600, **alone)
    llm = LLM(model, max_model_len=600, device="cpu")
    try:
        llm.generate(prompts[:1], params[:1], use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    assert token_ids(outputs) == expected
    assert {output.num_cached_tokens for output in outputs[1:]} == {512}


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
KIMI = {
    **EXPERTS,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_num_heads": 3,
    "linear_head_dim": 32,
}
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 40, "num_hidden_layers": 6, "query_pre_attn_scalar": 32},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 33,
        "num_hidden_layers": 2,
    },
    "qwen3_5_text": DELTA,
    "glm4_moe_lite": {
        "num_key_value_heads": 6,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "head_dim": 16,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
    "gpt2": {"n_inner": 160},
    "kimi_linear": KIMI,
    "laguna": {
        **EXPERTS,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [6, 12, 6],
        "num_hidden_layers": 3,
        "sliding_window": 40,
        "shared_expert_intermediate_size": 64,
    },
    "lfm2": LFM2,
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 3,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 4,
        "mamba_d_state": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "falcon_h1": {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_rms_norm": True,
        "mamba_proj_bias": True,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.6, 0.5, 1.4],
        "mlp_multipliers": [0.88, 0.4],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 64,
    },
}
"""With windows, sinks, experts, states and latents."""


@pytest.mark.thinned(7)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_bits_of_other_families_do_not_depend_on_the_batch(
    family: str,
    quantization: str | None,
    shared_checkpoint: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps of a few tokens are recorded."""
    changes = {"model_type": family, **OTHER_FAMILIES[family], "eos_token_id": 7}
    model = shared_checkpoint(**{**MODEL, **changes, "pad_token_id": 0, "bos_token_id": 1})
    caplog.set_level(logging.INFO, "nanovllm")
    ways = (*FEW, "drafts, chunks, preempted", *(["call by call"] if quantization is None else []))
    options = {"quantization": quantization, "kvcache_block_size": 32, **ONE_KV}
    assert_same_bits(model, ways, **options)
    assert "call by call" not in caplog.text


@pytest.mark.parametrize("sizes", [(80, 100, 20), (33, 48, 32)])
def test_bits_of_a_model_of_any_size_do_not_depend_on_the_batch(
    sizes: tuple[int, int, int],
    shared_checkpoint: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Symptom: torch computes linears whose inputs are not a multiple of 32."""
    caplog.set_level(logging.INFO, "nanovllm")
    names = "hidden_size", "intermediate_size", "head_dim"
    model = shared_checkpoint(**{**MODEL, **dict(zip(names, sizes, strict=True))})
    ways = ("batches of 64", *FEW, "call by call")
    assert_same_bits(model, ways, **ONE_KV)
    assert "call by call" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tokens_do_not_depend_on_torchs_default_dtype(model: str, dtype: torch.dtype) -> None:
    """Symptom: scratch memory has torch's default dtype, and the C kernels write past its end."""
    prompts = [[1, 2, 3], [4, 5], [6]]
    params = [
        SamplingParams(max_tokens=20, seed=1, repetition_penalty=1.1, frequency_penalty=0.1),
        SamplingParams(max_tokens=20, seed=2, top_k=20),
        SamplingParams(max_tokens=20, seed=3),
    ]
    expected = generate(model, (prompts, params))
    torch.set_default_dtype(dtype)
    try:
        assert generate(model, (prompts, params)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_native_kernels_false_calls_no_kernel(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: some steps call kernels although native_kernels is False."""

    def refuse(name: str, *args: Any) -> None:
        pytest.fail(f"{name} was called")

    monkeypatch.setattr(library_module, "call", refuse)
    llm = LLM(model, max_model_len=MAX_MODEL_LEN, device="cpu", native_kernels=False)
    try:
        for params in (
            SamplingParams(temperature=0, max_tokens=3),
            SamplingParams(max_tokens=3),
            [SamplingParams(temperature=t, top_p=0.9, max_tokens=3) for t in (0, 1)],
        ):
            assert len(llm.generate([[1, 2], [3]], params, use_tqdm=False)) == 2
    finally:
        llm.shutdown()


def test_tokens_stay_right_while_another_engine_is_built(model: str, workload: Any) -> None:
    """Symptom: the new engine records kernel calls of the running engine as its own."""
    running = LLM(model, max_model_len=MAX_MODEL_LEN, device="cpu")
    prompts, params = workload[0][:8], workload[1][:8]
    expected = token_ids(running.generate(prompts, params, use_tqdm=False))
    built = threading.Event()
    found: list[list[list[int]]] = []

    def run() -> None:
        while not built.is_set() or not found:
            found.append(token_ids(running.generate(prompts, params, use_tqdm=False)))

    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(run)
        try:
            for _ in range(5):
                LLM(model, max_model_len=MAX_MODEL_LEN, device="cpu").shutdown()
        finally:
            built.set()
        work.result()
    running.shutdown()
    assert all(tokens == expected for tokens in found)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_logprobs_are_close_to_plain_torchs(
    each_model: str, workload: Any, quantization: str | None, kv_cache_dtype: str
) -> None:
    """With and without the kernels, log-probabilities differ by rounding only.

    With int4, the kernels round activations too.
    """
    limit = {None: 0.04, "int8": 0.05, "int4": 0.1}[quantization]
    prompts = workload[0][:16]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for changes in ({"kv_cache_dtype": kv_cache_dtype}, {"native_kernels": False}):
        llm = LLM(
            each_model,
            max_model_len=MAX_MODEL_LEN,
            device="cpu",
            quantization=quantization,
            **changes,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append(
            torch.tensor(
                [
                    entry[token].logprob
                    for output in outputs
                    for entry, token in zip(
                        output.prompt_logprobs, output.prompt_token_ids, strict=True
                    )
                    if entry is not None
                ]
            )
        )
    assert (found[0] - found[1]).abs().mean() < limit * found[1].std()


def test_steps_with_torch_operations_run_call_by_call(
    shared_checkpoint: Callable[..., str], workload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """torch computes experts whose gates are not a multiple of 32, so no step can be recorded."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    narrow = shared_checkpoint(**MODEL, model_type="qwen3_moe", **experts)
    prompts, params = workload
    with caplog.at_level(logging.INFO, "nanovllm"):
        generate(narrow, (prompts[:8], params[:8]))
    assert "steps run call by call: torch computes aten." in caplog.text


def test_bytes_of_a_block_in_a_quantised_kv_cache(model: str) -> None:
    blocks = []
    for kv_cache_dtype in ("auto", "int8", "int4"):
        llm = LLM(
            model,
            max_model_len=MAX_MODEL_LEN,
            device="cpu",
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=10**6,
        )
        blocks.append(llm.engine.worker_info.num_blocks)
        llm.shutdown()
    # A head has 32 numbers: 64 bytes in bfloat16; in int8 32 and a scale's 2; in int4 16,
    # and 4 for a key's scale and minimum or 2 for a value's scale.
    assert blocks == [10**6 // (64 * size * 12) for size in (64, 34, 19)]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_kv_cache_needs_the_kernels(model: str, kind: str) -> None:
    needed = f'kv_cache_dtype "{kind}"'
    with pytest.raises(ConfigError, match=rf'{needed} needs .* C kernels; use "auto"'):
        LLM(model, kv_cache_dtype=kind, native_kernels=False, device="cpu")
    with pytest.raises(ConfigError, match=rf"{needed} .*cpu: needs bfloat16"):
        LLM(model, kv_cache_dtype=kind, dtype="float32", device="cpu")
