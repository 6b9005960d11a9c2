"""Checkpoints in FP8 and FP4, of compressed-tensors and ModelOpt, beside what they stand for.

FORMAT_CASES=1 runs each layout in each family; without it each runs in one of them.
"""

import logging
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu.library import library
from tests.checkpoints import copy_checkpoint, read_json, write_json
from tests.models.comparison import assert_logits_agree, random_prompts
from tests.quantization.float_checkpoints import Cover, make_compressed, make_modelopt, scheme_of
from tests.quantization.float_families import COVER, FAMILIES, load_family, save_family

COMPRESSED = {
    "NVFP4": scheme_of("NVFP4"),
    "NVFP4A16": scheme_of("NVFP4A16"),
    "MXFP4": scheme_of("MXFP4"),
    "MXFP4A16": scheme_of("MXFP4A16"),
    "FP8 tensor, static": scheme_of("FP8"),
    "FP8 tensor, dynamic": scheme_of("FP8_DYNAMIC", strategy="tensor"),
    "FP8 channels": scheme_of("FP8_DYNAMIC"),
    "FP8 channels, weights only": scheme_of("FP8_DYNAMIC"),
    "FP8 blocks": scheme_of("FP8_BLOCK", block_structure=[16, 32]),
}
COMPRESSED["FP8 channels, weights only"].input_activations = None
COMPRESSED["FP8 channels, weights only"].format = "naive-quantized"
MODELOPT = {
    "ModelOpt NVFP4": ("NVFP4", False),
    "ModelOpt NVFP4, weights only": ("W4A16_NVFP4", False),
    "ModelOpt FP8": ("FP8", True),
    "ModelOpt FP8 channels": ("FP8_PER_CHANNEL_PER_TOKEN", False),
}
"""The algorithm, and whether the settings are in the older file."""
NAMES = [*COMPRESSED, *MODELOPT]
FEW = "FORMAT_CASES" not in os.environ
CASES = [
    (name, family)
    for i, name in enumerate(NAMES)
    for j, family in enumerate(FAMILIES)
    if not FEW or j == i % len(FAMILIES)
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(name, model, path):
    """Store `model` as `name` says; return it and the float32 checkpoint that it stands for."""
    if name in COMPRESSED:
        return make_compressed(model, path, COMPRESSED[name], COVER)
    algorithm, in_old_file = MODELOPT[name]
    return make_modelopt(model, path, algorithm, COVER, in_old_file=in_old_file)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_logits(name, family, tmp_path):
    stored, wide = make(name, save_family(tmp_path / "model", family), tmp_path)
    assert_logits_agree(load_family(wide, family), stored, name)


@pytest.fixture(scope="module")
def fp4(tmp_path_factory):
    """A model in NVFP4, and the float32 checkpoint that it stands for."""
    path = tmp_path_factory.mktemp("fp4")
    return make("NVFP4", save_family(path / "model", "qwen3"), path)


def prompt_logprobs(llm):
    """Return the log-probabilities of the tokens of two prompts."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(random_prompts(0, 1003, [40, 60]), params, use_tqdm=False)
    return torch.tensor(
        [
            next(iter(found.values())).logprob
            for output in outputs
            for found in output.prompt_logprobs
            if found
        ]
    )


@pytest.mark.skipif(library() is None, reason="no compiler here")
def test_kept_bits(fp4, make_llm, caplog):
    """The inputs are rounded to 8 bits, as with weights in int8: the errors are alike."""
    stored, wide = fp4
    exact = prompt_logprobs(make_llm(wide, device="cpu", dtype="float32"))
    rounded = make_llm(wide, device="cpu", dtype="bfloat16", quantization="int8")
    with caplog.at_level(logging.INFO, "nanovllm"):
        kept = make_llm(stored, device="cpu", dtype="bfloat16")
    assert "14 linears in NVFP4: kept in 4 bits" in caplog.text
    assert "call by call" not in caplog.text
    found = prompt_logprobs(kept)
    error = (prompt_logprobs(rounded) - exact).abs().mean()
    assert (found - exact).abs().mean() < 1.25 * error
    prompts = random_prompts(1, 1003, [3, 50, 17])
    together = kept.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        [alone] = kept.generate([prompt], GREEDY, use_tqdm=False)
        assert alone.token_ids == output.token_ids


def test_dummy_weights(fp4, make_llm):
    prompts = random_prompts(1, 1003, [3, 17])
    first, second = (
        make_llm(fp4[0], device="cpu", load_format="dummy").generate(
            prompts, GREEDY, use_tqdm=False
        )
        for _ in range(2)
    )
    assert [output.token_ids for output in first] == [output.token_ids for output in second]


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_it_is_not_converted(quantization, fp4, make_llm):
    with pytest.raises(ConfigError, match=f"{quantization}': .* is in compressed-tensors"):
        make_llm(fp4[0], device="cpu", quantization=quantization)


def test_linears_of_mixed_precision(random_model, tmp_path):
    """Attention in FP8, MLPs in NVFP4, the rest in plain numbers."""
    fp8, wide = make_modelopt(random_model, tmp_path / "fp8", "FP8")
    nvfp4, other = make_modelopt(random_model, tmp_path / "nvfp4", "NVFP4")
    for first, second in ((fp8, nvfp4), (wide, other)):
        found = load_file(f"{first}/model.safetensors")
        found = {name: tensor for name, tensor in found.items() if ".mlp." not in name}
        more = load_file(f"{second}/model.safetensors")
        found |= {name: tensor for name, tensor in more.items() if ".mlp." in name}
        save_file(found, f"{first}/model.safetensors")
    config = read_json(tmp_path / "fp8/stored/config.json")
    names = [f"model.layers.{i}." for i in range(3)]
    layers = {f"{name}self_attn": {"quant_algo": "FP8"} for name in names}
    layers |= {f"{name}mlp": {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    write_json(tmp_path / "fp8/stored/config.json", config)
    assert_logits_agree(load_family(wide, "qwen3"), fp8, "mixed")


def test_scales_of_keys_and_values_are_not_read(random_model, make_llm, tmp_path, caplog):
    """A cache in the model's dtype needs none. It is more exact than what the file asks for."""
    stored, wide = make_compressed(random_model, tmp_path, COMPRESSED["FP8 channels"])
    file = f"{stored}/model.safetensors"
    scales = {
        f"model.layers.{i}.self_attn.{part}_scale": torch.tensor([0.25])
        for i in range(3)
        for part in "kv"
    }
    save_file(load_file(file) | scales, file)
    config = read_json(tmp_path / "stored/config.json")["quantization_config"]
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    model = copy_checkpoint(stored, tmp_path / "kv", quantization_config=config)
    with caplog.at_level(logging.INFO, "nanovllm"):
        found = make_llm(model, device="cpu")
    assert "asks for keys and values in FP8: they are kept in the model's dtype" in caplog.text
    prompts = random_prompts(1, 1003, [3, 17])
    ours, theirs = (
        llm.generate(prompts, GREEDY, use_tqdm=False) for llm in (found, make_llm(wide))
    )
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("NVFP4", 1),
        pytest.param("FP8 tensor, static", 2, marks=pytest.mark.long),
        ("FP8 blocks", 1),
        ("ModelOpt W4A16_NVFP4", 1),
        ("ModelOpt FP8", 1),
    ],
)
def test_heads_and_embeddings(name, num_ranks, make_llm, tmp_path):
    """Symptom: "unexpected lm_head.weight_scale" for a checkpoint that lists its head."""
    model = save_family(tmp_path / "model", "qwen3")
    ends = ("lm_head", "embed_tokens")
    cover = Cover(lambda linear: linear.endswith(ends), ["re:.*_proj$"], ["*_proj"])
    if name in COMPRESSED:
        stored, wide = make_compressed(model, tmp_path, COMPRESSED[name], cover)
    else:
        algorithm = name.removeprefix("ModelOpt ")
        stored, wide = make_modelopt(model, tmp_path, algorithm, cover, quant_method=None)
    if num_ranks == 1:
        assert_logits_agree(load_family(wide, "qwen3"), stored, name)
        return
    prompts = random_prompts(1, 1003, [3, 17])
    ours, theirs = (
        make_llm(path, device="cpu", dtype="float32", tensor_parallel_size=size)
        for path, size in ((stored, 2), (wide, 1))
    )
    ours, theirs = (llm.generate(prompts, GREEDY, use_tqdm=False) for llm in (ours, theirs))
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
