"""A kind of layer with state that no model has: all of it is in this file.

Its state is the sum of its inputs and their number, so that any token that is missing in a state,
or is there twice, changes what follows.
"""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.attention.batch import Batch
from nanovllm.errors import OutOfMemoryError
from nanovllm.kernels.states import StatePart
from nanovllm.kernels.torch_states import read_parts, write_parts
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.state_layer import StateLayer
from nanovllm.models import registry
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import RequestOutput
from nanovllm.worker.model_report import report
from tests.checkpoints import SMALL, read_json, write_json
from tests.helpers import (
    assert_idle,
    assert_same_outputs,
    generate_all,
    parameter_requests,
)

NAME = "RunningMeanForCausalLM"
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 48, "kvcache_block_size": 4}
REQUESTS = parameter_requests()[:20]


class RunningMean(StateLayer):
    """The mean of a sequence's inputs up to each token, between two linears."""

    def __init__(self, size: int) -> None:
        super().__init__((StatePart((size,), torch.float32), StatePart((1,), torch.int64)))
        self.in_proj = LinearBase(size, size)
        self.o_proj = LinearBase(size, size)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = batch.state
        assert rows is not None
        (inputs,) = self.extended([self.in_proj(hidden)], rows)
        means = torch.empty_like(inputs)
        total, count = (read_parts(self.states, rows, part)[:, 0] for part in (0, 1))
        ends, lens = rows.cu_seqlens.tolist(), rows.write_lens.tolist()
        for row, (start, end) in enumerate(itertools.pairwise(ends)):
            running, number = total[row].clone(), count[row].clone()
            for token in range(start, end):
                running += inputs[token].float()
                number += 1
                means[token] = running / number
                if token + 1 == start + lens[row]:
                    total[row], count[row] = running, number
        write_parts(self.states, rows, 0, total[:, None])
        write_parts(self.states, rows, 1, count[:, None])
        out: torch.Tensor = self.o_proj(self.own(means, rows))
        return batch.outputs(out)


class RunningMeanForCausalLM(DecoderForCausalLM):
    """Nothing: a running mean, or attention in each second layer."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        if index % 2 == 0:
            mixer: Any = RunningMean(config.hidden_size)
        else:
            rotary = self.rotary_emb(config.rope, config.head_dim)
            mixer = SelfAttention(config, rotary, qk_norm=True)
        return DecoderLayer(config, mixer, GatedMLP(config))


class Mean(nn.Module):
    """The same over a whole sequence, in a model of transformers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(2))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        counts = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        return self.o_proj(self.in_proj(hidden_states).cumsum(1) / counts), None


def reference() -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL)).eval()
    for layer in model.model.layers[::2]:
        layer.self_attn = Mean(SMALL["hidden_size"])
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scaled = noise * 1.5 / parameter.shape[-1] ** 0.5
        parameter.data = 1.5 + 0.5 * noise if name.endswith("norm.weight") else scaled
    return model


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.MODULES, NAME, "running_mean")
        patch.setitem(sys.modules, "nanovllm.models.running_mean", sys.modules[__name__])
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("running_mean")
    reference().save_pretrained(path)
    config = read_json(path / "config.json")
    write_json(path / "config.json", {**config, "architectures": [NAME], "layer_types": None})
    return str(path)


@pytest.fixture(scope="module")
def expected(model: str, registered: None) -> list[RequestOutput]:
    """The outputs of one request at a time, whole prompts, no cache."""
    llm = LLM(model, **OPTIONS, enable_prefix_caching=False)
    outputs = [output for request in REQUESTS for output in generate_all(llm, [request])]
    llm.shutdown()
    return outputs


@torch.inference_mode()
def test_tokens_are_those_of_transformers(model: str, make_llm: Any) -> None:
    prompts = [prompt for prompt, _ in REQUESTS[:8]]
    llm = make_llm(model, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = llm.generate(prompts, params, use_tqdm=False)
    compared = reference()
    for prompt, output in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt + output.token_ids])
        logits = compared(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert output.token_ids == logits.argmax(-1).tolist()
        assert len(output.token_ids) == 12
    assert_idle(llm)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
        {"num_kvcache_blocks": 24},
    ],
    ids=str,
)
def test_outputs_do_not_depend_on_how_the_work_is_cut(
    model: str, make_llm: Any, expected: list[RequestOutput], options: dict[str, Any]
) -> None:
    llm = make_llm(model, **OPTIONS, **options)
    assert_same_outputs(generate_all(llm, REQUESTS), expected)
    warm = generate_all(llm, REQUESTS)
    assert_same_outputs(warm, expected)
    if not options:
        assert sum(output.num_cached_tokens for output in warm) > 60


def test_memory_of_states(model: str, make_llm: Any) -> None:
    """Three parts take 64 * 4 and 8 bytes in each of two layers."""
    llm = make_llm(model, **OPTIONS, num_kvcache_blocks=40)
    info, network = llm.engine.worker_info, llm.engine.executor._runner.network
    assert info.kv.state_pages == network.attention.states.num_pages == 1
    assert network.attention.states.num_bytes == 2 * (64 * 4 + 8)
    assert network.block_bytes == 4 * 2 * 2 * 24 * 4  # one layer's KV of 4 tokens
    with pytest.raises(OutOfMemoryError, match=r"needs 13, 1 of them for its state; lower max_mod"):
        make_llm(model, **OPTIONS, num_kvcache_blocks=12)
    make_llm(model, **OPTIONS, num_kvcache_blocks=13)
    found = report(model)
    state = {"kind": "RunningMean", "parts": ((1, (64,), "float32"), (1, (1,), "int64"))}
    assert found["states"] == [{"num_layers": 2, **state}]
    assert found["attention"][0]["num_layers"] == 1
    assert found["memory"]["state_bytes"] == 2 * (64 * 4 + 8)
