"""Random configurations of each family, in which each switch of the family has its turn."""

import os
import random

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.checkpoints import random_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "rope_theta": 10_000.0}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
WINDOWS = [5, 16, 17, 40, 1000]
"""Shorter and longer than the blocks and the prompts."""
TYPES = [
    None,
    ["full_attention", "sliding_attention"] * 3,
    ["sliding_attention"] * 2 + ["full_attention"] * 4,
]
GRANITE_MOE = {
    "embedding_multiplier": [1.0, 12.0],
    "attention_multiplier": [0.1, 0.3],
    "residual_multiplier": [0.22, 1.0, 0.5],
    "logits_scaling": [8.0, 1.0],
    "attention_bias": [True, False],
    "rope": [{}, LLAMA3],
    "num_local_experts": [4, 9, 5],
    "num_experts_per_tok": [2, 4, 1, 3],
}
SWITCHES = {
    "mistral": {"sliding_window": [None, *WINDOWS]},
    "ministral3": {
        "rope": [
            {**YARN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": original}
            for original in (16, 33, 1024)
        ],
        "mscale": [None, (1.0, 1.0), (0.8, 0.4)],
    },
    "phi3": {"sliding_window": [None, *WINDOWS], "rope": [{}, LONG, LONG], "long": [False, True]},
    "smollm3": {
        "no_rope_layer_interval": [4, 2],
        "no_rope_layers": [None, [0, 1, 1, 0, 1, 1]],
        "use_sliding_window": [False, True],
        "sliding_window": WINDOWS,
        "attention_bias": [False, True],
        "mlp_bias": [True, False],
    },
    "granite": {
        "embedding_multiplier": [1.0, 12.0],
        "attention_multiplier": [0.1, 1.0],
        "residual_multiplier": [0.22, 1.0, 0.5],
        "logits_scaling": [8.0, 1.0],
        "attention_bias": [True, False],
        "mlp_bias": [False, True],
        "rope": [{}, LLAMA3],
    },
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE | {"shared_intermediate_size": [40, 0, 77]},
    "minicpm3": {
        "latent": [(20, 24), (None, 36), (20, 16)],
        "qk_nope_head_dim": [16, 6],
        "v_head_dim": [None, 12],
        "rope": [
            {},
            {"rope_type": "longrope"},
            {**YARN, "mscale": 0.8, "mscale_all_dim": 0.4},
            {**YARN, "mscale_all_dim": 0.7},
        ],
        "long": [False, True],
        "attention_bias": [False, True],
        "scale_emb": [12, 1],
        "scale_depth": [1.4, None],
        "dim_model_base": [None, 24],
    },
    "olmo2": {"attention_bias": [False, True], "rope": [{}, YARN]},
    "olmo3": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "attention_bias": [False, True],
        "typed_rope": [None, BY_TYPE],
    },
    "gemma2": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "attn_logit_softcapping": [5.0, None, 50.0],
        "final_logit_softcapping": [10.0, None],
        "query_pre_attn_scalar": [24, 100],
        "attention_bias": [True, False],
    },
    "gemma3_text": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "final_logit_softcapping": [None, 10.0],
        "query_pre_attn_scalar": [24, 100],
        "typed_rope": [None, BY_TYPE],
    },
    "gemma4_text": {
        "sliding_window": WINDOWS,
        "layer_types": [None, ["sliding_attention", "full_attention"] * 3],
        "global_head_dim": [32, 8],
        "shared": [0, 2],
        "hidden_size_per_layer_input": [0, 12],
        "attention_k_eq_v": [False, True],
        "num_global_key_value_heads": [None, 1],
        "use_double_wide_mlp": [True, False],
        "final_logit_softcapping": [5.0, None],
    },
    "exaone4": {"sliding_window": [*WINDOWS, None], "layer_types": TYPES},
    "seed_oss": {
        "attention_bias": [True, False],
        "attention_out_bias": [True, False, False],
        "mlp_bias": [False, True],
    },
    "hunyuan_v1_dense": {
        "attention_bias": [False, True],
        "rope": [{}, {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}],
    },
    "ernie4_5": {"use_bias": [True, False], "rope": [{}, LLAMA3]},
    "gpt2": {
        "activation_function": ["gelu_new", "gelu", "relu"],
        "n_inner": [None, 77, 48],
        "scale_attn_weights": [True, False],
        "scale_attn_by_inverse_layer_idx": [False, True],
        "reorder_and_upcast_attn": [False, True],
    },
    "gpt_neox": {
        "hidden_act": ["gelu", "gelu_fast", "relu"],
        "use_parallel_residual": [True, False],
        "attention_bias": [True, False, True],
        "rope": [{"partial_rotary_factor": share} for share in (0.25, 1.0, 0.5)],
    },
    "cohere": {"logit_scale": [0.0625, 0.8], "attention_bias": [False, True], "rope": [{}, LLAMA3]},
    "cohere2": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "logit_scale": [0.25, 1.0],
        "attention_bias": [False, True],
    },
    "gpt_oss": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "attention_bias": [True, False],
        "rope": [{**YARN, "truncate": False}, {}, YARN],
        "num_local_experts": [4, 9, 5],
        "num_experts_per_tok": [2, 4, 1, 3],
    },
}
DEEPSEEK = {
    "latent": [(20, 24), (None, 36), (20, 16)],
    "qk_nope_head_dim": [16, 6],
    "v_head_dim": [16, 12],
    "rope": [
        {},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 64},
        {**YARN, "mscale_all_dim": 0.7},
    ],
    "attention_bias": [False, True],
    "first_k_dense_replace": [1, 0, 2],
    "n_routed_experts": [8, 12],
    "n_shared_experts": [1, 2],
    "num_experts_per_tok": [2, 4, 3],
    "moe_intermediate_size": [24, 7],
    "routed_scaling_factor": [1.0, 2.5],
}
EXPERTS = {"num_experts_per_tok": [2, 3, 1], "moe_intermediate_size": [24, 7]}
SPARSE = ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]
SWITCHES |= {
    "glm4_moe": {
        "use_qk_norm": [True, False],
        "attention_bias": [False, True],
        "rope": [{"partial_rotary_factor": 0.5}, {}],
        "n_routed_experts": [8, 16],
        "groups": [(1, 1), (4, 2), (2, 1)],
        "first_k_dense_replace": [1, 0, 2],
        "n_shared_experts": [1, 2],
        "norm_topk_prob": [True, False],
        "routed_scaling_factor": [2.5, 1.0],
        **EXPERTS,
    },
    "ernie4_5_moe": {
        "moe_num_experts": [8, 5],
        "moe_k": [2, 3, 1],
        "moe_num_shared_experts": [1, 2, 0],
        "moe_layer_start_index": [1, 0],
        "moe_layer_end_index": [-1, 2],
        "moe_layer_interval": [1, 2],
        "moe_intermediate_size": [24, 7],
    },
    "laguna": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "typed_rope": [
            None,
            {
                **BY_TYPE,
                "full_attention": {**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
        ],
        "gating": [True, "per-element", "per-head"],
        "more_heads": [True, False],
        "attention_bias": [False, True],
        "mlp_layer_types": [None, SPARSE],
        "moe_routed_scaling_factor": [2.5, 1.0],
        "shared_expert_intermediate_size": [24, 40],
        "num_experts": [8, 5],
        **EXPERTS,
    },
    "mellum": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "typed_rope": [BY_TYPE, None],
        "attention_bias": [False, True],
        "norm_topk_prob": [True, False],
        "mlp_layer_types": [None, SPARSE],
        "num_experts": [8, 5],
        **EXPERTS,
    },
    "afmoe": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "global_attn_every_n_layers": [4, 2],
        "attention_bias": [False, True],
        "mup_enabled": [True, False],
        "num_dense_layers": [1, 0, 2],
        "num_shared_experts": [1, 2],
        "route_scale": [2.5, 1.0],
        "num_experts": [8, 5],
        **EXPERTS,
    },
    "minimax_m2": {
        "rope": [{"partial_rotary_factor": 0.5}, {}, YARN],
        "num_local_experts": [8, 5],
        "num_experts_per_tok": [2, 3, 1],
    },
}
MISTRAL4_TEXT = {
    "model_type": "mistral4",
    "num_key_value_heads": None,
    "latent": (20, 24),
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 24,
    "v_head_dim": 16,
    "rope": {
        **YARN,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 33,
        "partial_rotary_factor": 1 / 3,
    },
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
SWITCHES |= {
    "deepseek_v2": {
        **DEEPSEEK,
        "topk_method": ["greedy", "group_limited_greedy"],
        "groups": [(4, 2), (2, 1), (2, 2)],
    },
    "deepseek_v3": {
        **DEEPSEEK,
        "norm_topk_prob": [True, False],
        "groups": [(1, 1), (4, 2), (2, 1)],
        "rope_interleave": [True, False],
    },
    "glm4_moe_lite": {
        **{name: DEEPSEEK[name] for name in DEEPSEEK if name != "first_k_dense_replace"},
        "mlp_layer_types": [None, ["sparse", "dense"] * 2],
        "norm_topk_prob": [True, False],
        "rope_interleave": [True, False],
    },
    "mistral4": {
        **DEEPSEEK,
        "rope": [
            {**YARN, "llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
            for beta, original in ((0.1, 16), (0.3, 1024), (0.1, 33))
        ],
        "mscale": [(1.0, 1.0), (0.8, 0.4)],
        "norm_topk_prob": [True, False],
        "rope_interleave": [True, False],
    },
    "gemma3": {
        name: values
        for name, values in SWITCHES["gemma3_text"].items()
        if name != "final_logit_softcapping"  # transformers' class for pictures leaves it out
    },
    "gemma4": {
        **SWITCHES["gemma4_text"],
        "enable_moe_block": [True],
        "num_experts": [4, 9, 5],
        "top_k_experts": [2, 4, 1, 3],
        "moe_intermediate_size": [24, 7],
    },
    "gemma4_unified": {
        name: values
        for name, values in SWITCHES["gemma4_text"].items()
        if name != "hidden_size_per_layer_input"
    },
    "mistral3": {
        "text": [MISTRAL4_TEXT]
        + [
            {"model_type": "ministral3", "rope": rope, "mscale": mscale}
            for rope in SWITCHES["ministral3"]["rope"]
            for mscale in SWITCHES["ministral3"]["mscale"]
        ]
        + [{"model_type": "mistral", "sliding_window": window} for window in (None, 17, 1000)]
    },
    "qwen3_vl": {
        "attention_bias": [False, True],
        "rope": [{"rope_theta": theta, "mrope_interleaved": True} for theta in (1e4, 5e5, 5e6)],
        "mrope_section": [[4, 2, 2], [2, 3, 3], [8, 0, 0]],
    },
    "qwen2_5_vl": {
        "rope": [{"rope_theta": theta} for theta in (1e4, 1e6)],
        "mrope_section": [[2, 1, 1], [1, 2, 1]],
    },
    "qwen3_vl_moe": {
        "attention_bias": [False, True],
        "rope": [{"rope_theta": theta, "mrope_interleaved": True} for theta in (1e4, 5e5)],
        "mrope_section": [[4, 2, 2], [2, 3, 3]],
        "num_experts": [4, 9],
        "num_experts_per_tok": [2, 3, 1],
        "moe_intermediate_size": [24, 40],
        "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [1]],
    },
    "muse_glimmer": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "layer_rope_theta": [None, [1e4, 0, 5e3, 1e6, 0, 7e4]],
        "attention_bias": [False, True],
        "qk_scale_factor": [3.87, 1.0],
        "output_multiplier": [0.2, 1.0],
        "final_logit_softcapping": [20.0, 3.0],
        "post_norm_eps": [1e-8, 0.1],
    },
}
"""By transformers' model type: the values of each switch. Those in NESTED are of the text model."""
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIGLIP = {**TOWER, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GEMMA4 = {**TOWER, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
PATCHES = {"patch_size": 2, "mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 8}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
NESTED = {
    "gemma3": {
        "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {"vision_config": {**GEMMA4, "position_embedding_size": 64}},
    "gemma4_unified": {"vision_config": PATCHES},
    "mistral3": {"vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 16}},
    "qwen2_5_vl": {"vision_config": {**QWEN, "fullatt_block_indexes": [0]}},
    "qwen3_vl": {"vision_config": {**QWEN, "deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {"vision_config": {**QWEN, "deepstack_visual_indexes": [0]}},
    "muse_glimmer": {
        "vision_config": {**TOWER, "num_attention_heads": 2},
        "out_hidden_size": 32,
        "projector_hidden_size": 32,
    },
}
"""What a model that also takes pictures has beside its text model."""
HEADS_OF_8 = ("phi3", "exaone4", "olmo2", "olmo3", "qwen2_5_vl")
EIGHT_TIMES = (*HEADS_OF_8, "smollm3", "granite")
EIGHT_TIMES += ("hunyuan_v1_dense", "granitemoe", "granitemoeshared")
"""Families whose hidden size is a multiple of the number of heads."""
LATENT = {"minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"}
"""Families with latent attention."""
NUM_CASES = int(os.environ.get("FAMILY_CASES", "1"))
"""Of each family. Twelve have each switch both ways, with several of the others."""
CASES = [f"{family} {number}" for family in SWITCHES for number in range(NUM_CASES)]


def make_config(case):
    """Return the configuration of a case; its sizes are random, and each switch has its turn."""
    family, number = case.split()
    chooser, number = random.Random(case), int(number)
    switches = in_turn(SWITCHES[family], number)
    group, kv_heads = [1, 2, 8][number % 3], chooser.choice([1, 2])
    num_heads = group * kv_heads
    settings = {
        "vocab_size": chooser.choice([500, 503]),
        "hidden_size": chooser.choice([48, 64]),
        "intermediate_size": chooser.choice([48, 77]),
        "num_hidden_layers": 6 if {"layer_types", "shared"} & switches.keys() else 4,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": chooser.choice([16, 24]),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": chooser.random() < 0.5,
        "rms_norm_eps": chooser.choice([1e-6, 1e-3]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family in EIGHT_TIMES:
        settings["hidden_size"] = num_heads * 8
        settings["head_dim"] = 8 if family in HEADS_OF_8 else 16
    if family in LATENT:
        settings |= {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 8}
        del settings["head_dim"]
    if family in ("gpt2", "gpt_neox", "cohere", "cohere2"):
        settings["hidden_size"] = num_heads * settings.pop("head_dim")
        settings["layer_norm_eps"] = settings["layer_norm_epsilon"] = settings["rms_norm_eps"]
    if family == "muse_glimmer":
        settings["hidden_size"] = 48 if num_heads < 16 else 64  # a multiple of num_heads
    fields = {**settings, **in_transformers_names(switches, settings)}
    return config_of(family, fields, NESTED)


def in_turn(table, number):
    """Return one value of each switch."""
    # The stride is odd, so that switches of equally many values do not go together.
    return {
        name: values[(number // (1 + place % 3) + place) % len(values)]
        for place, (name, values) in enumerate(table.items())
    }


def config_of(family, fields, nested):
    """Return a configuration with `fields`, which are the text model's if `nested` has others."""
    if family not in nested:
        return AutoConfig.for_model(family, **fields)
    tied = fields["tie_word_embeddings"]
    return AutoConfig.for_model(
        family, text_config=fields, tie_word_embeddings=tied, **nested[family]
    )


def in_transformers_names(switches, settings):
    """Return the switches as fields of a configuration."""
    switches |= switches.pop("text", {})
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **switches.pop("rope", {})}
    if (groups := switches.pop("groups", None)) is not None:
        switches["n_group"], switches["topk_group"] = groups
    if (latent := switches.pop("latent", None)) is not None:
        switches["q_lora_rank"], switches["kv_lora_rank"] = latent
    if (mscales := switches.pop("mscale", None)) is not None:
        rope["mscale"], rope["mscale_all_dim"] = mscales
    if rope["rope_type"] == "longrope":
        head_dim = settings.get("head_dim", settings.get("qk_rope_head_dim"))
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["short_factor"] = [1.0 + 0.1 * pair for pair in range(pairs)]
        rope["long_factor"] = [2.0 + 0.3 * pair for pair in range(pairs)]
    original = 2 if switches.pop("long", False) else 2048  # shorter texts have other angles there
    if rope["rope_type"] == "longrope":
        switches["original_max_position_embeddings"] = original
    if switches.pop("more_heads", False):
        heads = settings["num_attention_heads"]
        switches["num_attention_heads_per_layer"] = [heads, 2 * heads] * 3
    if (shared := switches.pop("shared", None)) is not None:
        switches["num_kv_shared_layers"] = shared
        if shared:  # transformers fails without the other two
            switches["layer_types"] = ["sliding_attention", "full_attention"] * 3
            if "hidden_size_per_layer_input" in switches:
                switches["hidden_size_per_layer_input"] = 12
        if switches.get("hidden_size_per_layer_input"):
            switches["vocab_size_per_layer_input"] = settings["vocab_size"]
    if switches.get("sliding_window", 0) is None and "layer_types" in switches:
        switches["layer_types"] = ["full_attention"] * 6
    if (section := switches.pop("mrope_section", None)) is not None:
        pairs = settings["head_dim"] // 2
        rope["mrope_section"] = [pairs - sum(section[1:]), *section[1:]]
    if "typed_rope" in switches:
        if (typed := switches.pop("typed_rope")) is not None:
            switches["rope_parameters"] = typed
    elif "global_head_dim" not in switches:
        switches["rope_parameters"] = rope
    return switches


def make_model(case):
    """Return transformers' model of a case. All weights are random, those of norms included."""
    config = make_config(case)
    config._attn_implementation = "eager"  # the others leave out soft caps
    with_pictures = case.split()[0] in (*NESTED, "mistral4")  # transformers has both there
    model_class = AutoModelForImageTextToText if with_pictures else AutoModelForCausalLM
    model = random_model(config, seed=len(case), model_class=model_class)
    with_experts = {"num_experts_per_tok", "moe_k"} & SWITCHES[case.split()[0]].keys()
    if with_experts or case.startswith(("gemma4 ", "mistral3 ")):
        model.set_experts_implementation("eager")  # the default takes only some sizes
    for name, weight in model.named_parameters():
        if case.startswith("gemma4") and name.endswith("q_norm.weight"):
            weight.data *= 0.3  # its scores have no other scale: rounding errors would grow
        latent = case.split()[0] in LATENT and name.endswith("q_proj.weight")
        if latent or name.endswith("q_b_proj.weight"):
            weight.data *= 0.2  # the same: there are no norms of queries and keys
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(random.Random(name).uniform(0.5, 1.5))
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(
                0.2 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1))
            )
    return model
