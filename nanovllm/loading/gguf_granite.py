"""Granite in a GGUF file: names and settings. Gates and ups are separate tensors there.

The dense models and those with experts of Granite 4 are of the same class as those with layers that
keep a state, so their files have the sizes of such a layer, too.

Reads metadata, no weight. Imports no torch.
"""

from nanovllm.loading.gguf_family import EXPERTS, Fields, GgufFamily
from nanovllm.loading.gguf_header import Metadata

_OF_STATES = tuple(
    f"ssm.{name}"
    for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)


def _fields(metadata: Metadata, config: Fields) -> Fields:
    """Return the fields of Granite's config.json beyond the common ones: no layer has a state."""
    for key in _OF_STATES:
        metadata.own(key)
    heads = config["num_key_value_heads"]
    listed = metadata.listed("attention.head_count_kv", config["num_hidden_layers"], int)
    if {*(listed or ())} - {heads}:
        rule = "equally many in all layers"
        raise metadata.unsupported("attention.head_count_kv", listed, rule)
    scale = metadata.number("attention.scale", config["head_dim"] ** -0.5)
    return {"attention_multiplier": scale}


def _dense_fields(metadata: Metadata, config: Fields) -> Fields:
    for key in ("expert_shared_feed_forward_length", "expert_used_count"):
        metadata.own(key)  # without an expert_count there are no experts
    return _fields(metadata, config)


def _moe_fields(metadata: Metadata, config: Fields) -> Fields:
    shared = metadata.size("expert_shared_feed_forward_length", 0)
    return {**_fields(metadata, config), "shared_intermediate_size": shared}


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
