"""Families with layers that keep a state, beside transformers' own classes: logits and tokens."""

import dataclasses
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from nanovllm import SamplingParams
from nanovllm.core.worker_info import pages_for
from nanovllm.features.quantization.integer import IntWeight
from nanovllm.layers.linear import WeightModule
from nanovllm.loading.hub import open_checkpoint, weight_files
from nanovllm.models.registry import read_config
from nanovllm.options.config import Config
from nanovllm.platform.cpu import CPU
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network
from tests.checkpoints import random_model
from tests.models.comparison import (  # noqa: F401
    MAX_LENGTH,
    NUM_TOKENS,
    assert_logits_agree,
    assert_tokens_are_greedy,
    random_prompts,
    runs,
    saved_models,
    test_logits_of_all_positions,
    vocab_size_of,
)
from tests.models.family_cases import GRANITE_MOE, NUM_CASES, YARN, config_of, in_turn
from tests.test_native_invariance import MODEL, OTHER_FAMILIES

THETA = {"rope_theta": 1e4}
DELTA = ["linear_attention"]
CONV = ["conv"]
FULL = ["full_attention"]
SLIDING = ["sliding_attention"]


def orders(other):
    """Return types of layers: the first, the last, or most of them have full attention."""
    return [
        other * 3 + FULL,
        FULL + other * 2,
        other + FULL * 2 + other,
        (FULL + other) * 2,
        other * 2 + FULL,
    ]


HEADS = [(2, 2), (2, 4), (1, 4), (3, 3), (2, 8)]
"""Key and value heads."""
EXPERTS = {"experts": [(4, 2), (9, 3), (5, 1)]}
"""Their number, and that of a token."""
DELTA_SWITCHES = {
    "layer_types": orders(DELTA),
    "linear_heads": HEADS,
    "linear_conv_kernel_dim": [4, 4, 2],
    "attention_bias": [False, True],
    "rope": [{"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.5}, {**YARN}],
}
CONV_SWITCHES = {
    "layer_types": orders(CONV),
    "conv_L_cache": [3, 4, 2],
    "conv_bias": [False, True],
    "norm_eps": [1e-5, 1e-3],
    "rope": [{}, {**YARN}],
}
MAMBA_SWITCHES = {
    "layer_types": orders(DELTA),
    "mamba_heads": [(2, 4), (1, 4), (2, 2), (1, 8), (4, 8)],
    "conv_bias": [True, True, False],
    "conv": [4, 2, 3],
    "bias": [False, True, False],
    "time_step_limit": [(0.0, torch.inf), (0.02, torch.inf), (0.01, 0.4)],
}
"""Heads: their groups, and how many."""
FALCON_MULTIPLIERS = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.35, 0.25, 0.6, 0.5, 1.4],
    "mlp_multipliers": [0.88, 0.4],
}
KIMI_SWITCHES = {
    "layer_types": orders(DELTA),
    "kimi": [(2, 8, 4), (4, 10, 2), (1, 16, 4), (3, 7, 3)],
    "kv_lora_rank": [24, 36],
    "v_head_dim": [12, 16],
    "groups": [(1, 1), (2, 1), (2, 2)],
    "experts": [(4, 2), (8, 3), (6, 1)],
    "first_k_dense_replace": [1, 0, 2],
    "norm_topk_prob": [True, False],
    "n_shared_experts": [1, 2],
    "routed_scaling_factor": [2.446, 1.0],
    "attention_bias": [False, False, True],
    "rms_norm_eps": [1e-5, 1e-3],
}
"""kimi: heads, their size, and taps."""
LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
}
LFM3_SWITCHES = {
    "layer_types": [
        CONV + FULL + CONV + SLIDING + CONV,
        SLIDING + CONV * 2 + FULL,
        FULL + SLIDING + CONV,
        CONV * 2 + SLIDING * 2 + FULL + SLIDING,
        CONV + FULL,
    ],
    "conv_L_cache": [7, 2, 4],
    "conv_bias": [False, True],
    "norm_eps": [1e-5, 1e-3],
    "sliding_window": [5, 16, 17, 40, 1000],
    "use_sandwich_norm": [True, True, False],
    "use_attention_gate": [True, False, True],
    "attention_bias": [False, True],
    "rope": [{**LFM3_ROPE}, {**LFM3_ROPE, "full_attention": {**YARN, "rope_theta": 1e5}}],
}
LFM2_SWITCHES = CONV_SWITCHES | {
    "block_auto_adjust_ff_dim": [True, False],
    "block_ffn_dim_multiplier": [1.0, 1.3],
    "block_multiple_of": [16, 7],
}
SWITCHES = {
    "qwen3_5_text": DELTA_SWITCHES,
    "qwen3_5_moe_text": DELTA_SWITCHES | EXPERTS,
    "qwen3_next": DELTA_SWITCHES
    | EXPERTS
    | {
        "norm_topk_prob": [True, False],
        "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [1]],
    },
    "lfm2": LFM2_SWITCHES,
    "lfm2_vl": LFM2_SWITCHES,
    "lfm2_moe": CONV_SWITCHES
    | EXPERTS
    | {
        "norm_topk_prob": [True, False],
        "use_expert_bias": [True, False, True],
        "routed_scaling_factor": [1.0, 2.5],
        "num_dense_layers": [1, 0],
    },
    "lfm3": LFM3_SWITCHES,
    "lfm3_vl": LFM3_SWITCHES,
    "bamba": MAMBA_SWITCHES
    | {
        "attention_bias": [False, True],
        "mlp_bias": [True, False],
        "mamba_expand": [2, 1],
        "rope": [{}, {**YARN}],
    },
    "granitemoehybrid": MAMBA_SWITCHES
    | GRANITE_MOE
    | {
        "layer_types": [*orders(DELTA), ["mamba"] * 3 + ["attention"], ["attention"] * 4],
        "position_embedding_type": [None, "rope", "nope"],
        "shared_intermediate_size": [40, 77],
        "num_local_experts": [5, 0, 0],
        "mamba_expand": [2, 1],
    },
    "falcon_h1": MAMBA_SWITCHES
    | {
        "mamba_rms_norm": [True, False],
        "mamba_norm_before_gate": [False, True],
        "projectors_bias": [False, True, False],
        "multipliers": [FALCON_MULTIPLIERS, {}, {**FALCON_MULTIPLIERS, "ssm_in_multiplier": 1.0}],
        "attention_bias": [False, True],
        "mlp_bias": [True, False],
        "rope": [{}, {**YARN}],
    },
    "kimi_linear": KIMI_SWITCHES | {"q_lora_rank": [None, 20]},
    "bailing_hybrid": KIMI_SWITCHES
    | {
        "kda_safe_gate": [True, False],
        "kda_lower_bound": [-5.0, -0.5],
        "rope": [{}, {**YARN}, {**YARN, "mscale": 0.8, "mscale_all_dim": 0.7}],
    },
    "nemotron_h": MAMBA_SWITCHES
    | EXPERTS
    | {
        "layer_types": [
            [*DELTA, "moe", *FULL, "mlp", *DELTA],
            ["moe", *FULL, *DELTA * 2, "moe"],
            [*DELTA, "mlp", *DELTA, *FULL],
            ["mlp", *DELTA, *FULL, "mlp"],
        ],
        "mlp_bias": [False, True],
        "norm_topk_prob": [True, False],
        "routed_scaling_factor": [2.5, 1.0],
        "rope": [{}],
    },
    "qwen3_5": DELTA_SWITCHES | {"mrope": [True, False]},
    "qwen3_5_moe": DELTA_SWITCHES | EXPERTS,
}
"""By transformers' model type: the values of each switch. Those in NESTED are of the text model."""
VISION = {"hidden_size": 32, "intermediate_size": 32}
QWEN_VISION = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
LFM_VISION = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
NESTED = {
    "qwen3_5": {"vision_config": QWEN_VISION},
    "qwen3_5_moe": {"vision_config": QWEN_VISION},
    "lfm2_vl": {
        "vision_config": {
            **VISION,
            "model_type": "siglip2_vision_model",
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "projector_hidden_size": 32,
    },
    "lfm3_vl": {"vision_config": LFM_VISION, "projector_hidden_size": 32},
}
"""What a model that also takes pictures has beside its text model."""
CASES = [f"{family} {number}" for family in SWITCHES for number in range(NUM_CASES)]


def make_config(case):
    """Return the configuration of a case; its sizes are random, and each switch has its turn."""
    family, number = case.split()
    chooser, number = random.Random(case), int(number)
    switches = in_turn(SWITCHES[family], number)
    kv_heads = chooser.choice([1, 2])
    num_heads = kv_heads * [1, 2, 4][number % 3]
    settings = {
        "vocab_size": chooser.choice([500, 503]),
        "hidden_size": chooser.choice([48, 64]),
        "intermediate_size": chooser.choice([48, 77]),
        "num_hidden_layers": len(switches["layer_types"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": chooser.choice([16, 24]),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": chooser.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    rope = switches.pop("rope", {})
    typed = "full_attention" in rope
    settings["rope_parameters"] = rope if typed else {"rope_type": "default", **THETA, **rope}
    if "linear_heads" in switches:
        keys, values = switches.pop("linear_heads")
        settings |= {"linear_num_key_heads": keys, "linear_num_value_heads": values}
        settings["linear_key_head_dim"] = chooser.choice([8, 10, 16])
        settings["linear_value_head_dim"] = chooser.choice([8, 12, 16])
        settings["rms_norm_eps"] = chooser.choice([1e-6, 1e-3])
    if "mamba_heads" in switches:
        settings["rms_norm_eps"] = chooser.choice([1e-6, 1e-3])
        settings |= mamba_settings(family, switches, chooser)
    if "kimi" in switches:
        heads, size, taps = switches.pop("kimi")
        settings |= {"linear_num_heads": heads, "linear_head_dim": size}
        settings |= {"linear_conv_kernel_dim": taps, "num_key_value_heads": num_heads}
        settings |= {"qk_nope_head_dim": chooser.choice([16, 6]), "qk_rope_head_dim": 8}
        switches["n_group"], switches["topk_group"] = switches.pop("groups")
        if family == "kimi_linear":
            del settings["rope_parameters"]
    if "experts" in switches:
        experts, chosen = switches.pop("experts")
        settings |= {"num_experts": experts, "num_experts_per_tok": chosen}
        settings |= {"moe_intermediate_size": chooser.choice([7, 24])}
        settings |= {"shared_expert_intermediate_size": chooser.choice([9, 40])}
    if switches.pop("mrope", False):
        sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        settings["rope_parameters"] |= {**sections, "partial_rotary_factor": 0.5}
        settings["head_dim"] = 16
    fields = {**settings, **switches}
    return config_of(family, fields, NESTED)


def mamba_settings(family, switches, chooser):
    """Return the fields of `family` for switches of MAMBA_SWITCHES, which are taken out."""
    groups, heads = switches.pop("mamba_heads")
    size = chooser.choice([5, 8])
    found = {
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_state": chooser.choice([8, 10, 16]),
        "mamba_d_conv": switches.pop("conv"),
        "mamba_conv_bias": switches.pop("conv_bias"),
        "mamba_proj_bias": switches.pop("bias"),
    }
    if family == "bamba":
        types = enumerate(switches.pop("layer_types"))
        found["attn_layer_indices"] = [i for i, kind in types if kind == "full_attention"]
    if family == "nemotron_h":
        experts, chosen = switches.pop("experts")
        return {
            "layers_block_type": switches.pop("layer_types"),
            "mamba_num_heads": heads,
            "mamba_head_dim": size,
            "n_groups": groups,
            "ssm_state_size": found["mamba_d_state"],
            "conv_kernel": found["mamba_d_conv"],
            "use_conv_bias": found["mamba_conv_bias"],
            "use_bias": found["mamba_proj_bias"],
            "time_step_min": (shortest := switches.pop("time_step_limit")[0] or 1e-9),
            "time_step_limit": (shortest, torch.inf),  # transformers takes time_step_min instead
            "layer_norm_epsilon": chooser.choice([1e-6, 1e-3]),
            "n_routed_experts": experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": chooser.choice([7, 24]),
            "moe_shared_expert_intermediate_size": chooser.choice([9, 40]),
        }
    if family == "falcon_h1":
        del switches["layer_types"]  # all are alike
        found |= {"mamba_d_ssm": heads * size, "mamba_d_head": size, "num_hidden_layers": 2}
        found |= switches.pop("multipliers")
    return found


GATED_NORMS = tuple(f"{name}.weight" for name in ("linear_attn.norm", "mamba.norm", "mixer.norm"))
GATED_NORMS += ("o_norm.weight",)


def make_model(case):
    """Return transformers' model of a case. All weights are random, those of norms included."""
    nested = case.split()[0] in NESTED
    model_class = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    seed = random.Random(case).randrange(100)
    model = random_model(make_config(case), seed=seed, model_class=model_class)
    for name, weight in model.named_parameters():
        if name.endswith(GATED_NORMS):
            weight.data *= 0.3  # what it normalises may be small: rounding errors would grow
        elif name.endswith("A_log"):
            weight.data -= 3.0  # transformers sums up to 64 logarithms of decays: small ones
        elif name.endswith("norm.weight") and "qwen" in case:
            weight.data -= 1.0  # 1 is added
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    if {"experts", "num_local_experts"} & SWITCHES[case.split()[0]].keys():
        model.set_experts_implementation("eager")  # the default takes only some sizes
    return model


saved = saved_models(make_model, CASES)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("saved", "chunk"), runs(CASES, (7, 64, 1)), indirect=["saved"])
def test_greedy_tokens(saved, chunk, make_llm, preempted):
    """Tokens behind each of three prompts: batched, in chunks, from a hit, and preempted."""
    case, theirs, path = saved
    prompts = random_prompts(case, vocab_size_of(theirs), [3, 17, 60])
    options = {"device": "cpu", "max_model_len": MAX_LENGTH, "kvcache_block_size": 16}
    options["max_num_batched_tokens"] = chunk
    llm = make_llm(path, num_kvcache_blocks=300, **options)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_tokens_are_greedy(theirs, prompts, outputs)

    def answer(prompt, **changes):
        [output] = llm.generate([prompt], dataclasses.replace(params, **changes), use_tqdm=False)
        return output.num_cached_tokens, [choice.token_ids for choice in output.outputs]

    expected = outputs[2].token_ids
    assert answer(prompts[2]) == (48, [expected])
    cached, tokens = answer(prompts[2] + expected[:24], max_tokens=16)
    assert cached in (48, 64, 80)
    assert tokens == [expected[24:40]]
    assert answer(prompts[2][:50] + prompts[1], max_tokens=8)[0] == 48
    llm.reset_prefix_cache()
    assert answer(prompts[2], n=3) == (0, [expected] * 3)

    info = llm.engine.worker_info
    fewest = pages_for(MAX_LENGTH, 16, info.kv.windows, chunk) + 3 * info.kv.state_pages
    llm = make_llm(path, num_kvcache_blocks=fewest + 4, **options)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]
    assert preempted or chunk == 1


WITH_EXPERTS = {
    **OTHER_FAMILIES["qwen3_5_text"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
SMALL_PARTS = {
    "qwen3_5_moe_text": WITH_EXPERTS,
    "kimi_linear": OTHER_FAMILIES["kimi_linear"],
}


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("qwen3_5_moe_text", "int8"), ("qwen3_5_moe_text", "int4"), ("kimi_linear", "int4")],
)
def test_small_parts_keep_their_bits(family, quantization, shared_checkpoint):
    """Those that choose experts, open gates, or say how a state decays."""
    sizes = {**MODEL, **SMALL_PARTS[family], "model_type": family, "dtype": "float32"}
    path = shared_checkpoint(**sizes, pad_token_id=0, bos_token_id=1)
    checkpoint = open_checkpoint(path)
    config = Config(path, device="cpu", quantization=quantization)
    files = weight_files(checkpoint, path)
    spec = NetworkSpec(config, read_config(checkpoint.config), files)
    model = Network(spec, MAX_LENGTH, CPU()).model
    kept = {
        ".".join(name.split(".")[-2:])
        for name, module in model.named_modules()
        if isinstance(module, WeightModule) and not isinstance(module.method, IntWeight)
    }
    expected = {"self_attn.in_proj_ab", "mlp.gate", "mlp.shared_expert_gate"}
    if family == "kimi_linear":
        expected = {"f.a", "f.b", "g.a", "g.b", "self_attn.b", "mlp.gate"}
        expected |= {"self_attn.k_b_proj", "self_attn.v_b_proj"}
    assert kept == expected
    assert model.model.layers[0].self_attn.conv1d.weight.dtype == torch.float32


def test_published_form(tmp_path, caplog):
    """Qwen's own files have tensors of all experts, and a layer for drafts that is left out."""
    case = "qwen3_5_moe_text 1"
    theirs = make_model(case)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name, parameter in theirs.named_parameters():
        if ".experts." in name:
            tensors[name] = parameter.data
    tensors = {name.replace("model.", "model.language_model."): tensors[name] for name in tensors}
    tensors |= {"mtp.fc.weight": torch.ones(3, 6), "model.visual.patch.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level("INFO", logger="nanovllm.loading.loader"):
        assert_logits_agree(theirs, tmp_path, case)
    assert "model.visual.* (1 tensors), mtp.* (1 tensors)" in caplog.text


@pytest.mark.parametrize(
    ("case", "saved", "published"),
    [
        ("kimi_linear 1", ".0.block_sparse_moe.", ".0.mlp."),
        ("bailing_hybrid 0", ".attention.dense.", ".attention.o_proj."),
    ],
)
def test_published_names(case, saved, published, tmp_path, caplog):
    """transformers saves other names, where it does not matter to it. Layers for drafts are left
    out.
    """
    theirs = make_model(case)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(saved in name for name in tensors)
    tensors = {name.replace(saved, published): tensors[name] for name in tensors}
    layers = theirs.config.num_hidden_layers
    if "bailing" in case:
        tensors |= {f"model.layers.{layers}.eh_proj.weight": torch.ones(3, 6)}
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level("INFO", logger="nanovllm.loading.loader"):
        assert_logits_agree(theirs, tmp_path, case)
    assert (f"model.layers.{layers}.* (1 tensors)" in caplog.text) == ("bailing" in case)
