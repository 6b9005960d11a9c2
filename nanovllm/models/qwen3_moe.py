"""Qwen3 with a mixture of experts, and Mellum 2, which also has windows."""

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.experts import SparseMLP
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.expert_parts import is_dense, is_typed_dense, sparse_mlp
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES, attention_biases


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3-30B-A3B and 235B-A22B: Qwen3 with experts in place of the MLP.

    The router has no bias; its weights are a softmax over all experts or over the chosen ones.
    """

    reads = frozenset({"num_experts", "num_local_experts"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = SelfAttention(config, rotary_emb, qk_norm=True, **attention_biases(config))
        if is_dense(config, index):
            return DecoderLayer(config, attention, GatedMLP(config))
        return DecoderLayer(config, attention, self.make_experts(config))

    def make_experts(self, config: ModelConfig) -> SparseMLP:
        """Return the experts of a layer."""
        renormalize = config.flag("norm_topk_prob")
        return sparse_mlp(config, config.size("moe_intermediate_size"), renormalize=renormalize)


class MellumForCausalLM(DecoderForCausalLM):
    """Mellum 2 12B-A2.5B: Qwen3-MoE with a window in some layers, which have their own rotary
    angles.
    """

    left_out = OTHER_MODALITIES
    ignores = frozenset({"original_max_position_embeddings", "first_k_dense_replace"})
    """The first but not in rope_parameters."""
    reads = frozenset({"layer_types", "rope_parameters", "num_experts", "num_local_experts"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope_of(config.layer_types(0)[index]), config.head_dim),
            qk_norm=True,
            options=AttentionOptions(window=config.windows(0)[index]),
            **attention_biases(config),
        )
        if is_typed_dense(config, index):
            return DecoderLayer(config, attention, GatedMLP(config))
        size = config.size("moe_intermediate_size")
        renormalize = config.flag("norm_topk_prob")
        return DecoderLayer(config, attention, sparse_mlp(config, size, renormalize=renormalize))
