"""A model with states runs on the Triton kernels: a small Qwen3.5, prompts in chunks, decode steps,
and hits of the prefix cache. Without a GPU the kernels are interpreted, or simulated.
"""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention.triton import TritonBackend
from nanovllm.kernels.triton.kernels import TritonKernels
from nanovllm.worker import attention_groups, network
from tests.checkpoints import make_checkpoint
from tests.kernels.triton.inputs import CUDA, each_dtype
from tests.kernels.triton.interpreter import patch_interpreter

patch_interpreter()
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


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
@each_dtype
def test_the_engine_generates_the_same_tokens(dtype, tmp_path, monkeypatch):
    name, steps = str(dtype).removeprefix("torch."), []
    path = make_checkpoint(tmp_path, **QWEN3_5, dtype=name)
    expected = logprobs(path, name)

    class Watched(TritonKernels):
        def gated_delta(self, qkv, *args):
            steps.append(len(qkv))
            return super().gated_delta(qkv, *args)

    monkeypatch.setattr(network, "select_kernels", lambda *_, **__: Watched())
    monkeypatch.setattr(attention_groups, "select_backend", lambda spec, _: TritonBackend(spec))
    results = logprobs(path, name)
    assert {1, 6} <= set(steps)
    for (tokens, total), (found, other) in zip(expected, results, strict=True):
        assert found == tokens
        assert other == pytest.approx(total, abs=100 * torch.finfo(dtype).eps)
