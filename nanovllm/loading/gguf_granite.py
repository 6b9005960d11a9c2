"""Granite in a GGUF file: names and settings. Gates and ups are separate tensors there.

Those with layers that keep a state are an architecture of their own. The others of Granite 4 are of
the same class, so their files have the sizes of such a layer, too.

Reads metadata, no weight. Imports no torch.
"""

from nanovllm.loading.gguf_family import EXPERTS, Fields, GgufFamily
from nanovllm.loading.gguf_header import GGUFMetadata
from nanovllm.loading.gguf_mamba import (
    READINGS,
    SIZES,
    mamba_fields,
    mamba_modules,
    mamba_tensors,
)
from nanovllm.options.validation import check_bool

_OF_STATES = tuple(
    f"ssm.{name}"
    for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)


def _fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of Granite's config.json beyond the common ones: no layer has a state."""
    for key in _OF_STATES:
        metadata.own(key)
    heads = config["num_key_value_heads"]
    listed = metadata.listed("attention.head_count_kv", config["num_hidden_layers"], int)
    if {*(listed or ())} - {heads}:
        rule = "equally many in all layers"
        raise metadata.unsupported("attention.head_count_kv", listed, rule)
    return _scale(metadata, config)


def _scale(metadata: GGUFMetadata, config: Fields) -> Fields:
    scale = metadata.number("attention.scale", config["head_dim"] ** -0.5)
    return {"attention_multiplier": scale}


def _dense_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    for key in ("expert_shared_feed_forward_length", "expert_used_count"):
        metadata.own(key)  # without an expert_count there are no experts
    return _fields(metadata, config)


def _moe_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    shared = metadata.size("expert_shared_feed_forward_length", 0)
    return {**_fields(metadata, config), "shared_intermediate_size": shared}


def _hybrid_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of the models with layers that keep a state: those with no KV head."""
    heads = metadata.listed_for_layers("attention.head_count_kv", config["num_hidden_layers"], int)
    if {*heads} - {0, config["num_key_value_heads"]}:
        rule = "equally many in all layers with attention"
        raise metadata.unsupported("attention.head_count_kv", heads, rule)
    found = {**_scale(metadata, config), **mamba_fields(metadata, config)}
    expand, rest = divmod(found["mamba_d_ssm"], config["hidden_size"])
    if rest:
        rule = f"a multiple of {config['hidden_size']}"
        raise metadata.unsupported("ssm.inner_size", found["mamba_d_ssm"], rule)
    rotates = metadata.setting("rope.scaling.finetuned", check_bool, default=True)
    size = config["intermediate_size"]
    return found | {
        "mamba_expand": expand,
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in metadata.tensors),
        "position_embedding_type": "rope" if rotates else None,
        "num_local_experts": metadata.size("expert_count", 0),
        "num_experts_per_tok": metadata.size("expert_used_count", 0),
        "shared_intermediate_size": metadata.size("expert_shared_feed_forward_length", size),
    }


GRANITE = GgufFamily(
    "GraniteForCausalLM",
    permuted=True,
    numbers={
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    per_layer=frozenset({"attention.head_count_kv"}),
    fields=_dense_fields,
    neutral={"rope.scaling.finetuned": (True,)},  # False: no layer rotates
)
GRANITE_MOE = GRANITE._replace(
    architecture="GraniteMoeSharedForCausalLM",
    modules={
        **EXPERTS,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    sizes={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    fields=_moe_fields,
)
GRANITE_HYBRID = GRANITE_MOE._replace(
    architecture="GraniteMoeHybridForCausalLM",
    modules={
        **GRANITE_MOE.modules,
        **mamba_modules("mamba"),
        "ffn_down": "shared_mlp.output_linear",
    },
    tensors=mamba_tensors("mamba"),
    sizes=SIZES,
    fields=_hybrid_fields,
    readings=lambda config: READINGS,
    neutral={},
)
