"""The Laguna family: gated attention with windows, any number of heads in a layer, and experts."""

import dataclasses
from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.errors import CheckpointError
from nanovllm.models.config_fields import MAX_SIZE
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.expert_parts import BY_SIGMOID, is_typed_dense, sparse_mlp, with_shared
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import GatedAttention, NarrowGateAttention, attention_biases


class LagunaForCausalLM(DecoderForCausalLM):
    """Laguna XS 2.1: attention with a gate for each head; some layers have a window, other rotary
    angles and more heads; experts after the first layer, and one for all tokens.
    """

    names: ClassVar[dict[str, str]] = {
        "self_attn.gate_proj.": "self_attn.g_proj.",
        "mlp.expert_bias": "mlp.experts.e_score_correction_bias",
    }
    published: ClassVar[dict[str, str]] = {"mlp.shared_expert.": "mlp.shared_experts."}
    defaults: ClassVar[dict[str, Any]] = {"first_k_dense_replace": 1}
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "gating": (True, "per-head", "per-element"),
        "moe_router_logit_softcapping": (0.0,),
        "moe_apply_router_weight_on_input": (False,),
    }
    ignores = frozenset({"original_max_position_embeddings", "first_k_dense_replace"})
    """The first but not in rope_parameters."""
    reads = frozenset({"layer_types", "rope_parameters", "partial_rotary_factor", "num_experts"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = self.make_attention(config, index)
        if is_typed_dense(config, index):
            return DecoderLayer(config, attention, GatedMLP(config))
        factor = config.number("moe_routed_scaling_factor", 1.0)
        size = config.size("moe_intermediate_size")
        sparse = sparse_mlp(config, size, factor=factor, **BY_SIGMOID)
        shared_size = config.size("shared_expert_intermediate_size")
        return DecoderLayer(config, attention, with_shared(sparse, config, shared_size))

    def make_attention(self, config: ModelConfig, index: int) -> SelfAttention:
        """Return the attention of layer `index`."""
        gating = config.fields.get("gating", True)
        return (GatedAttention if gating == "per-element" else NarrowGateAttention)(
            dataclasses.replace(config, num_heads=_num_heads(config, index)),
            self.rotary_emb(config.rope_of(config.layer_types(0)[index]), config.head_dim),
            qk_norm=True,
            activation="softplus",
            options=AttentionOptions(window=config.windows(0)[index]),
            **attention_biases(config),
        )


def _num_heads(config: ModelConfig, index: int) -> int:
    """Return the number of query heads of layer `index`."""
    listed = config.per_layer("num_attention_heads_per_layer")
    found = listed[index] if listed else config.num_heads
    if found % config.num_kv_heads or not 1 <= found <= MAX_SIZE // config.head_dim:
        raise CheckpointError(
            f"config.json: num_attention_heads_per_layer {found} is no multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    return int(found)
