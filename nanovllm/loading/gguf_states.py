"""Models with layers that keep a state, in a GGUF file: Falcon-H1, Granite 4, LFM2, Nemotron-H and
Qwen3.5. Names, settings, and what llama.cpp's converter has changed.

What reading undoes, apart from names: ssm_a is -exp(A_log), and ssm_dt's bias is dt_bias; ssm_a,
ssm_d and ssm_norm have two dimensions, the weight of the convolution lacks one of 1. Falcon-H1's
factors are in the weights: those of a file are all 1.

Granite's gates and ups are separate tensors. Those with layers that keep a state are an
architecture of their own. The others of Granite 4 are of the same class, so their files have the
sizes of such a layer, too. LFM2's layers with a short convolution are those with no head of keys
and values.

Qwen3.5's norms are stored as 1 + w, but for ssm_norm, and the shared expert's gate lacks a
dimension of 1. Value heads are tiled and not grouped: value head p belongs to key head
p % (number of key heads), in transformers to p // (value heads of a key head). So are the V rows of
attn_qkv, the rows of attn_gate, ssm_alpha, ssm_beta, ssm_a and ssm_dt, the V channels of the
convolution, and the columns of ssm_out. A head of 128 is whole blocks of 32: in the types that stay
in their bits (see features/quantization/gguf.py) the blocks of ssm_out change places. K-quants have
blocks of 256, two heads, but are converted to numbers anyway. The layer that drafts (MTP) is the
block after the others.

Reads metadata, no weight. Imports no torch.
"""

from collections.abc import Mapping

from nanovllm.errors import CheckpointError
from nanovllm.loading.gguf_family import (
    EXPERT_SIZES,
    SHARED_EXPERT,
    Fields,
    GgufFamily,
    Order,
    Reading,
    dense_layers,
    has_tensor,
    rope_sections,
    without_drafts,
)
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
        name: has_tensor(metadata, f".{name}.bias") for name in ("ssm_conv1d", "ssm_in", "ssm_out")
    }
    return {
        "mamba_d_head": width // heads,
        "mamba_conv_bias": has_bias["ssm_conv1d"],
        "mamba_proj_bias": has_bias["ssm_in"],
        "projectors_bias": has_bias["ssm_out"],
        "mamba_d_ssm": width,
    }


def _by_layer(metadata: GGUFMetadata, config: Fields, key: str, size: int) -> list[int]:
    """Return a number of each layer: `size`, or 0 in the layers that lack what it counts."""
    found = metadata.listed_for_layers(key, config["num_hidden_layers"], int)
    if {*found} - {0, size}:
        raise metadata.unsupported(key, found, "equally many in all layers that have it")
    return found


def _falcon_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    return {
        **mamba_fields(metadata, config),
        "mamba_rms_norm": has_tensor(metadata, ".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _nemotron_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of Nemotron-H: layers with a KV head have attention, those with a size an
    MLP or experts, the others a state.
    """
    num_layers = without_drafts(metadata, config)["num_hidden_layers"]
    heads = _by_layer(metadata, config, "attention.head_count_kv", config["num_key_value_heads"])
    sizes = _by_layer(metadata, config, "feed_forward_length", config["intermediate_size"])
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
        "mlp_bias": has_tensor(metadata, ".ffn_up.bias"),
        "attention_bias": has_tensor(metadata, ".attn_q.bias"),
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


_NEMOTRON_H = GgufFamily(
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


_OF_STATES = tuple(
    f"ssm.{name}"
    for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)


def _granite_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of Granite's config.json beyond the common ones: no layer has a state."""
    for key in _OF_STATES:
        metadata.own(key)
    heads = config["num_key_value_heads"]
    listed = metadata.listed("attention.head_count_kv", config["num_hidden_layers"], int)
    if {*(listed or ())} - {heads}:
        rule = "equally many in all layers"
        raise metadata.unsupported("attention.head_count_kv", listed, rule)
    metadata.own("expert_used_count")  # without an expert_count there are no experts
    shared = metadata.size("expert_shared_feed_forward_length", 0)
    return {**_granite_scale(metadata, config), "shared_intermediate_size": shared}


def _granite_scale(metadata: GGUFMetadata, config: Fields) -> Fields:
    scale = metadata.number("attention.scale", config["head_dim"] ** -0.5)
    return {"attention_multiplier": scale}


def _granite_hybrid(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of the models with layers that keep a state: those with no KV head."""
    heads = _by_layer(metadata, config, "attention.head_count_kv", config["num_key_value_heads"])
    found = {**_granite_scale(metadata, config), **mamba_fields(metadata, config)}
    expand, rest = divmod(found["mamba_d_ssm"], config["hidden_size"])
    if rest:
        rule = f"a multiple of {config['hidden_size']}"
        raise metadata.unsupported("ssm.inner_size", found["mamba_d_ssm"], rule)
    rotates = metadata.setting("rope.scaling.finetuned", check_bool, default=True)
    size = config["intermediate_size"]
    return found | {
        "mamba_expand": expand,
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "attention_bias": has_tensor(metadata, ".attn_q.bias"),
        "position_embedding_type": "rope" if rotates else None,
        "num_local_experts": metadata.size("expert_count", 0),
        "num_experts_per_tok": metadata.size("expert_used_count", 0),
        "shared_intermediate_size": metadata.size("expert_shared_feed_forward_length", size),
    }


_GRANITE = GgufFamily(
    "GraniteForCausalLM",
    permuted=True,
    numbers={
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    per_layer=frozenset({"attention.head_count_kv"}),
    fields=_granite_fields,
    neutral={"rope.scaling.finetuned": (True,)},  # False: no layer rotates
)
_GRANITE_MOE = _GRANITE._replace(
    architecture="GraniteMoeSharedForCausalLM",
    modules={
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        **SHARED_EXPERT,
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    sizes={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
)


def _lfm2_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of _LFM2's config.json beyond the common ones."""
    heads = _by_layer(metadata, config, "attention.head_count_kv", config["num_key_value_heads"])
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": config["rms_norm_eps"],
        "conv_bias": has_tensor(metadata, "shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of the models with experts. llama.cpp always normalises their weights."""
    return _lfm2_fields(metadata, config) | {
        "num_dense_layers": dense_layers(metadata, config),
        "use_expert_bias": has_tensor(metadata, "exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


_LFM2 = GgufFamily(
    "Lfm2ForCausalLM",
    modules={
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    tensors={
        "token_embd_norm.weight": "model.embedding_norm.weight",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    sizes={"shortconv.l_cache": "conv_L_cache"},
    per_layer=frozenset({"attention.head_count_kv"}),
    fields=_lfm2_fields,
    readings=lambda config: {"shortconv.conv": Reading(axis=1)},
)


def _qwen35_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of Qwen3.5's config.json beyond the common ones."""
    num_drafting = metadata.size("nextn_predict_layers", 0)
    num_layers = config["num_hidden_layers"] - num_drafting
    if num_layers < 1:
        raise CheckpointError(
            f"{metadata.file}: {metadata.architecture}.nextn_predict_layers {num_drafting} must be "
            f"below block_count {config['num_hidden_layers']}"
        )
    num_heads = config["linear_num_value_heads"]
    width = metadata.size("ssm.inner_size")
    num_key_heads = config["linear_num_key_heads"]
    if width % num_heads or num_heads % num_key_heads:
        rule = f"a multiple of ssm.group_count {num_key_heads} that divides ssm.inner_size {width}"
        raise metadata.unsupported("ssm.time_step_rank", num_heads, rule)
    return {
        "num_hidden_layers": num_layers,
        "mtp_num_hidden_layers": num_drafting,
        "layer_types": _qwen35_layer_types(metadata, num_layers, num_drafting),
        "linear_value_head_dim": width // num_heads,
        **rope_sections(metadata, config),
    }


def _qwen35_layer_types(metadata: GGUFMetadata, num_layers: int, num_drafting: int) -> list[str]:
    """Return the type of each layer: by a list, or every so many layers have full attention."""
    interval = metadata.size("full_attention_interval", 4)
    listed = metadata.listed("attention.recurrent_layers", num_layers + num_drafting, bool)
    if listed is None:
        listed = [number % interval != 0 for number in range(1, num_layers + 1)]
    return ["linear_attention" if state else "full_attention" for state in listed[:num_layers]]


def _qwen35_readings(config: Fields) -> Mapping[str, Reading]:
    """Return how tensors are read, by llama.cpp's name of their module."""
    num_key_heads = config["linear_num_key_heads"]
    head_dim = config["linear_value_head_dim"]
    key_rows = 2 * num_key_heads * config["linear_key_head_dim"]
    heads = Order(num_key_heads)
    values = Order(num_key_heads, head_dim)
    behind_keys = values._replace(start=key_rows)
    norms = dict.fromkeys(
        (
            "attn_norm",
            "post_attention_norm",
            "attn_q_norm",
            "attn_k_norm",
            "output_norm",
            "nextn.enorm",
            "nextn.hnorm",
            "nextn.shared_head_norm",
        ),
        Reading(offset=-1.0),
    )
    return {
        **norms,
        "attn_qkv": Reading(behind_keys),
        "attn_gate": Reading(values),
        "ssm_alpha": Reading(heads),
        "ssm_beta": Reading(heads),
        "ssm_a": Reading(heads, is_decay=True),
        "ssm_dt": Reading(heads),
        "ssm_conv1d": Reading(behind_keys, axis=1),
        "ssm_out": Reading(columns=values),
        "ffn_gate_inp_shexp": Reading(axis=0),
    }


_QWEN35 = GgufFamily(
    "Qwen3_5ForCausalLM",
    modules={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    tensors={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    draft_tensors={
        "nextn.eh_proj.weight": "fc.weight",
        "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
        "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
        "nextn.shared_head_norm.weight": "norm.weight",
    },
    sizes={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    partial_rotation=True,
    fields=_qwen35_fields,
    readings=_qwen35_readings,
)


STATES: dict[str, GgufFamily] = {
    "falcon-h1": GgufFamily(
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
    ),
    "granite": _GRANITE,
    "granitehybrid": _GRANITE_MOE._replace(
        architecture="GraniteMoeHybridForCausalLM",
        modules={
            **_GRANITE_MOE.modules,
            **mamba_modules("mamba"),
            "ffn_down": "shared_mlp.output_linear",
        },
        tensors=mamba_tensors("mamba"),
        sizes=SIZES,
        fields=_granite_hybrid,
        readings=lambda config: READINGS,
        neutral={},
    ),
    "granitemoe": _GRANITE_MOE,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2._replace(
        architecture="Lfm2MoeForCausalLM",
        modules={
            **_LFM2.modules,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
        },
        sizes={**_LFM2.sizes, **EXPERT_SIZES},
        fields=_lfm2_moe_fields,
        neutral={"expert_gating_func": (2,)},  # a sigmoid
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H._replace(
        modules={
            **_NEMOTRON_H.modules,
            "ffn_gate_inp": "mixer.gate",
            "ffn_up_exps": "mixer.experts.{}.up_proj",
            "ffn_down_exps": "mixer.experts.{}.down_proj",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
        },
        tensors={**_NEMOTRON_H.tensors, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        sizes={
            **_NEMOTRON_H.sizes,
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        },
        fields=_nemotron_moe_fields,
        neutral={**_NEMOTRON_H.neutral, "expert_gating_func": (2,)},  # a sigmoid
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35._replace(
        architecture="Qwen3_5MoeForCausalLM",
        modules={
            **_QWEN35.modules,
            **SHARED_EXPERT,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        sizes={
            **_QWEN35.sizes,
            **EXPERT_SIZES,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        neutral={"expert_gating_func": (1,)},  # a softmax
    ),
}
