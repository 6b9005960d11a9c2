"""Models with Mamba-2 in a GGUF file: names, settings, and what llama.cpp's converter has changed.

What reading undoes, apart from names: ssm_a is -exp(A_log), and ssm_dt's bias is dt_bias; ssm_a,
ssm_d and ssm_norm have two dimensions, the weight of the convolution lacks one of 1.

Falcon-H1's factors are in the weights: those of a file are all 1.

Reads metadata, no weight. Imports no torch.
"""

from nanovllm.loading.gguf_family import Fields, GgufFamily, Reading, without_drafts
from nanovllm.loading.gguf_header import GGUFMetadata
from nanovllm.options.validation import check_bool

SIZES = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
READINGS = {
    "ssm_conv1d": Reading(axis=1),
    "ssm_a": Reading(is_decay=True, is_flat=True),
    "ssm_d": Reading(is_flat=True),
    "ssm_norm": Reading(is_flat=True),
}


def mamba_modules(parent: str) -> dict[str, str]:
    """Return the modules of a Mamba-2 layer at `parent`, by llama.cpp's name."""
    names = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj"}
    return {f"ssm_{name}": f"{parent}.{module}" for name, module in names.items()}


def mamba_tensors(parent: str) -> dict[str, str]:
    """Return its tensors that are of no module, by llama.cpp's name."""
    names = {"a": "A_log", "d": "D", "dt.bias": "dt_bias"}
    return {f"ssm_{name}": f"{parent}.{tensor}" for name, tensor in names.items()}


def mamba_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of Mamba-2 beyond `SIZES`."""
    width = metadata.size("ssm.inner_size")
    heads = metadata.size("ssm.time_step_rank")
    if width % heads:
        raise metadata.unsupported("ssm.time_step_rank", heads, f"a divisor of {width} channels")
    has_bias = {
        name: any(tensor.endswith(f".{name}.bias") for tensor in metadata.tensors)
        for name in ("ssm_conv1d", "ssm_in", "ssm_out")
    }
    return {
        "mamba_d_head": width // heads,
        "mamba_conv_bias": has_bias["ssm_conv1d"],
        "mamba_proj_bias": has_bias["ssm_in"],
        "projectors_bias": has_bias["ssm_out"],
        "mamba_d_ssm": width,
    }


def _falcon_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    return {
        **mamba_fields(metadata, config),
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in metadata.tensors),
        "mamba_norm_before_gate": False,
    }


FALCON_H1 = GgufFamily(
    "FalconH1ForCausalLM",
    modules={
        **mamba_modules("mamba"),
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    tensors={
        **mamba_tensors("mamba"),
        "output_norm.weight": "model.final_layernorm.weight",
        "ffn_norm": "pre_ff_layernorm.weight",  # as the converter names it
    },
    sizes=SIZES,
    fields=_falcon_fields,
    readings=lambda config: READINGS,
)


def _nemotron_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of Nemotron-H: layers with a KV head have attention, those with a size an
    MLP or experts, the others a state.
    """
    num_blocks = config["num_hidden_layers"]
    num_layers = without_drafts(metadata, config)["num_hidden_layers"]
    heads = metadata.listed_for_layers("attention.head_count_kv", num_blocks, int)
    sizes = metadata.listed_for_layers("feed_forward_length", num_blocks, int)
    for key, listed, size in (
        ("attention.head_count_kv", heads, config["num_key_value_heads"]),
        ("feed_forward_length", sizes, config["intermediate_size"]),
    ):
        if {*listed} - {0, size}:
            raise metadata.unsupported(key, listed, "equally many in all layers that have it")
    found = mamba_fields(metadata, config)
    mlp = "moe" if metadata.size("expert_count", 0) else "mlp"
    types = [
        "full_attention" if count else mlp if size else "linear_attention"
        for count, size in zip(heads, sizes, strict=True)
    ]
    metadata.own("rope.dimension_count")  # nothing rotates
    return {
        "num_hidden_layers": num_layers,
        "layers_block_type": types[:num_layers],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_head_dim": found["mamba_d_head"],
        "use_conv_bias": found["mamba_conv_bias"],
        "use_bias": found["mamba_proj_bias"],
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in metadata.tensors),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in metadata.tensors),
        "rope_parameters": {"rope_theta": 10_000.0},
    }


def _nemotron_moe_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    return _nemotron_fields(metadata, config) | {
        "n_group": metadata.size("expert_group_count", 1),
        "topk_group": metadata.size("expert_group_used_count", 1),
        "n_shared_experts": metadata.size("expert_shared_count", 1),
        "norm_topk_prob": metadata.setting("expert_weights_norm", check_bool, default=False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


NEMOTRON_H = GgufFamily(
    "NemotronHForCausalLM",
    layers="backbone.layers",
    modules={
        **mamba_modules("mixer"),
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
    },
    tensors={
        **mamba_tensors("mixer"),
        "token_embd.weight": "backbone.embeddings.weight",
        "output_norm.weight": "backbone.norm_f.weight",
    },
    permuted=True,
    per_layer=frozenset({"attention.head_count_kv", "feed_forward_length"}),
    sizes={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    partial_rotation=True,
    fields=_nemotron_fields,
    readings=lambda config: READINGS,
    leaves_out_drafts=True,
    neutral={"rope.scaling.finetuned": (False,)},  # no layer rotates
)
NEMOTRON_H_MOE = NEMOTRON_H._replace(
    modules={
        **NEMOTRON_H.modules,
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_exps": "mixer.experts.{}.up_proj",
        "ffn_down_exps": "mixer.experts.{}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
    tensors={**NEMOTRON_H.tensors, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    sizes={
        **NEMOTRON_H.sizes,
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    },
    fields=_nemotron_moe_fields,
    neutral={**NEMOTRON_H.neutral, "expert_gating_func": (2,)},  # a sigmoid
)
