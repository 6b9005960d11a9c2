"""The Mixtral family: Mistral with a mixture of experts in every layer."""

from typing import ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.experts import MAX_EXPERTS, Experts, Router, SparseMLP, StoredExperts
from nanovllm.models.config_fields import config_size
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.model_config import ModelConfig


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral 8x7B and 8x22B: Mistral with experts in place of the MLP.

    The weights of a token's experts are a softmax over the logits of these.
    """

    names: ClassVar[dict[str, str]] = {".mlp.": ".block_sparse_moe."}
    reads = frozenset({"num_local_experts"})

    def make_layer(
        self, config: ModelConfig, index: int, before: list[DecoderLayer]
    ) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        options = AttentionOptions(window=config.window())
        attention = SelfAttention(config, rotary_emb, options=options)
        num_experts = config_size(config.fields, "num_local_experts", 8, high=MAX_EXPERTS)
        top_k = config_size(config.fields, "num_experts_per_tok", 2, high=num_experts)
        experts = Experts(
            num_experts,
            config.hidden_size,
            config.intermediate_size,
            stored=StoredExperts(linears=("w1", "w3", "w2")),
        )
        router = Router(config.hidden_size, num_experts, top_k, renormalize=True)
        return DecoderLayer(config, attention, SparseMLP(router, experts))
