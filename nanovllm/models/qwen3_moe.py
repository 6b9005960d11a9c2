"""The Qwen3-MoE family: Qwen3 with a mixture of experts in most layers."""

from nanovllm.errors import CheckpointError
from nanovllm.layers.experts import MAX_EXPERTS, Experts, Router, SparseMLP
from nanovllm.models.config_fields import config_size
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3-30B-A3B and 235B-A22B: Qwen3 with experts in place of the MLP.

    The router has no bias; its weights are a softmax over all experts or the chosen.

    Layers in `mlp_only_layers` have an MLP, and so have those whose number, counted from 1, is no
    multiple of `decoder_sparse_step`.
    """

    reads = frozenset({"num_experts", "num_local_experts"})

    def make_layer(
        self, config: ModelConfig, index: int, before: list[DecoderLayer]
    ) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        bias = config.flag("attention_bias")
        attention = SelfAttention(config, rotary_emb, bias=bias, output_bias=bias, qk_norm=True)
        dense = config.fields.get("mlp_only_layers") or []
        if not isinstance(dense, list) or {*map(type, dense)} - {int}:
            raise CheckpointError(
                f"config.json: mlp_only_layers must be a list of numbers, is {shown(dense)}"
            )
        if index in dense or (index + 1) % config.size("decoder_sparse_step", 1):
            return DecoderLayer(config, attention, GatedMLP(config))
        return DecoderLayer(config, attention, _sparse_mlp(config))


def _sparse_mlp(config: ModelConfig) -> SparseMLP:
    # transformers 5 writes num_local_experts, transformers 4 wrote num_experts.
    key = "num_experts" if "num_experts" in config.fields else "num_local_experts"
    num_experts = config_size(config.fields, key, high=MAX_EXPERTS)
    top_k = config_size(config.fields, "num_experts_per_tok", 8, high=num_experts)
    renormalize = config.flag("norm_topk_prob")
    router = Router(config.hidden_size, num_experts, top_k, renormalize=renormalize)
    size = config.size("moe_intermediate_size")
    return SparseMLP(router, Experts(num_experts, config.hidden_size, size))
