"""What the config.json and the checkpoints of LFM2 call by names of their own, dense or not."""

from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.models.config_fields import MAX_SIZE
from nanovllm.models.hybrid_parts import check_mixed
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import check_int, shown

NAMES = {
    **{f"self_attn.{part}.": f"conv.{part}." for part in ("in_proj", "conv", "out_proj")},
    "self_attn.o_proj.": "self_attn.out_proj.",
    "self_attn.q_norm.": "self_attn.q_layernorm.",
    "self_attn.k_norm.": "self_attn.k_layernorm.",
    "input_layernorm.": "operator_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "model.norm.": "model.embedding_norm.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.": "feed_forward.",
}
DEFAULTS: dict[str, Any] = {
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}


def lfm2_types(config: ModelConfig) -> list[str]:
    """Return each layer's type: "conv" or "full_attention"."""
    attends = config.fields.get("full_attn_idxs")
    if config.fields.get("layer_types") is not None or attends is None:
        return check_mixed(config.layer_types(0, "conv"))
    if not isinstance(attends, list) or {*map(type, attends)} - {int}:
        raise CheckpointError(
            f"config.json: full_attn_idxs must be a list of numbers, is {shown(attends)}"
        )
    names = ("conv", "full_attention")
    return check_mixed([names[index in attends] for index in range(config.num_layers)])


def adjusted_size(config: ModelConfig) -> int:
    """Return the size of the MLP: two thirds of the config's, times a factor, rounded up."""
    size, multiple = config.intermediate_size, config.size("block_multiple_of")
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    size = -(-size // multiple) * multiple
    return check_int(CheckpointError, "config.json: the adjusted block_ff_dim", size, 1, MAX_SIZE)
