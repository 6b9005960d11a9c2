"""LFM2 in a GGUF file: names and settings. Its norms are stored as they are.

Layers with a short convolution are those with no head of keys and values in the list
attention.head_count_kv. Reads metadata, no weight. Imports no torch.
"""

from nanovllm.loading.gguf_family import EXPERT_SIZES, Fields, GgufFamily, Reading
from nanovllm.loading.gguf_header import GGUFMetadata
from nanovllm.options.validation import check_int


def _fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of LFM2's config.json beyond the common ones."""
    num_layers = config["num_hidden_layers"]
    heads = metadata.listed_for_layers("attention.head_count_kv", num_layers, int)
    if {*heads} - {0, config["num_key_value_heads"]}:
        rule = "equally many in all layers with attention"
        raise metadata.unsupported("attention.head_count_kv", heads, rule)
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": config["rms_norm_eps"],
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in metadata.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _moe_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the fields of the models with experts. llama.cpp always normalises their weights."""
    num_layers = config["num_hidden_layers"]
    dense = metadata.setting("leading_dense_block_count", check_int, 0, num_layers, default=0)
    return _fields(metadata, config) | {
        "num_dense_layers": dense,
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in metadata.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


LFM2 = GgufFamily(
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
    fields=_fields,
    readings=lambda config: {"shortconv.conv": Reading(axis=1)},
)
LFM2_MOE = LFM2._replace(
    architecture="Lfm2MoeForCausalLM",
    modules={
        **LFM2.modules,
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.{}.w1",
        "ffn_up_exps": "feed_forward.experts.{}.w3",
        "ffn_down_exps": "feed_forward.experts.{}.w2",
    },
    sizes={**LFM2.sizes, **EXPERT_SIZES},
    fields=_moe_fields,
    neutral={"expert_gating_func": (2,)},  # a sigmoid
)
