"""Models with states run on the Triton kernels: prompts in chunks, decode steps, and hits of the
prefix cache. Without a GPU the kernels are interpreted, or simulated.
"""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention.triton import TritonBackend
from nanovllm.kernels.triton.kernels import TritonKernels
from nanovllm.platform.cpu import CPU
from nanovllm.worker import attention_groups
from tests.checkpoints import make_checkpoint
from tests.kernels.triton.inputs import CUDA, few_dtypes
from tests.kernels.triton.interpreter import patch_interpreter

patch_interpreter()
SIZES = {
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
MODELS = {
    "gated_delta": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    "mamba2": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 1,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 2,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_rms_norm": True,
        "ssm_in_multiplier": 1.25,
    },
}
"""By the kernel that changes their states."""


def logprobs(path, dtype):
    options = {"max_model_len": 32, "max_num_batched_tokens": 6, "kvcache_block_size": 4}
    llm = LLM(str(path), dtype=dtype, num_kvcache_blocks=64, **options)
    try:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
        prompts = [list(range(5, 15)), [1, 2, 3]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate([prompts[0] + [60, 61]], params, use_tqdm=False)
        assert outputs[2].num_cached_tokens == 8
        return [(out.token_ids, out.outputs[0].cumulative_logprob) for out in outputs]
    finally:
        llm.shutdown()


@pytest.mark.skipif(CUDA, reason="the engine chooses the Triton kernels there")
@few_dtypes
@pytest.mark.parametrize("kernel", MODELS)
def test_the_engine_generates_the_same_tokens(kernel, dtype, tmp_path, monkeypatch):
    name, steps = str(dtype).removeprefix("torch."), []
    path = make_checkpoint(tmp_path, **SIZES, **MODELS[kernel], dtype=name)
    expected = logprobs(path, name)
    triton, change = TritonKernels(), getattr(TritonKernels, kernel)

    def watched(inputs, *args):
        steps.append(len(inputs))
        return change(inputs, *args)

    monkeypatch.setattr(triton, kernel, watched)
    monkeypatch.setattr(CPU, "kernels", lambda *_, **__: triton)
    monkeypatch.setattr(attention_groups, "select_backend", lambda spec, _: TritonBackend(spec))
    results = logprobs(path, name)
    assert {1, 6} <= set(steps)
    for (tokens, total), (found, other) in zip(expected, results, strict=True):
        assert found == tokens
        assert other == pytest.approx(total, abs=100 * torch.finfo(dtype).eps)
