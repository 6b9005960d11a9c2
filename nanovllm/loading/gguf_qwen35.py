"""Qwen3.5 in a GGUF file: names, settings, and what llama.cpp's converter has changed.

What reading undoes, apart from names:

1. Norms are stored as 1 + w, but for the one in a layer with state (ssm_norm).
2. ssm_a is -exp(A_log), and ssm_dt's bias is dt_bias.
3. The weight of the convolution has no dimension of 1, nor has the shared expert's gate.
4. Value heads are tiled and not grouped: value head p belongs to key head p % (number of key
   heads), in transformers to p // (value heads of a key head). So are the V rows of attn_qkv, the
   rows of attn_gate, ssm_alpha, ssm_beta, ssm_a and ssm_dt, the V channels of the convolution, and
   the columns of ssm_out. A head of 128 is whole blocks of 32: in the types that stay in their bits
   (see features/quantization/gguf.py) the blocks of ssm_out change places. K-quants have blocks of
   256, two heads, but are converted to numbers anyway.

The layer that drafts (MTP) is the block after the others.

Reads metadata, no weight. Imports no torch.
"""

from collections.abc import Mapping

from nanovllm.errors import CheckpointError
from nanovllm.loading.gguf_family import (
    EXPERT_SIZES,
    EXPERTS,
    SHARED_EXPERT,
    Fields,
    GgufFamily,
    Order,
    Reading,
)
from nanovllm.loading.gguf_header import GGUFMetadata


def _fields(metadata: GGUFMetadata, config: Fields) -> Fields:
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
        "layer_types": _layer_types(metadata, num_layers, num_drafting),
        "linear_value_head_dim": width // num_heads,
    }


def _layer_types(metadata: GGUFMetadata, num_layers: int, num_drafting: int) -> list[str]:
    """Return the type of each layer: by a list, or every so many layers have full attention."""
    interval = metadata.size("full_attention_interval", 4)
    listed = metadata.listed("attention.recurrent_layers", num_layers + num_drafting, bool)
    if listed is None:
        listed = [number % interval != 0 for number in range(1, num_layers + 1)]
    return ["linear_attention" if state else "full_attention" for state in listed[:num_layers]]


def _readings(config: Fields) -> Mapping[str, Reading]:
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


QWEN35 = GgufFamily(
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
    fields=_fields,
    readings=_readings,
)
QWEN35_MOE = QWEN35._replace(
    architecture="Qwen3_5MoeForCausalLM",
    modules={
        **QWEN35.modules,
        **EXPERTS,
        **SHARED_EXPERT,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    },
    sizes={
        **QWEN35.sizes,
        **EXPERT_SIZES,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    neutral={"expert_gating_func": (1,)},  # a softmax
)
