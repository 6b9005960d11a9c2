"""The Mixtral family: Mistral with a mixture of experts in every layer."""

from typing import ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.expert_parts import NUMBERED, sparse_mlp
from nanovllm.models.model_config import ModelConfig


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral 8x7B and 8x22B: Mistral with experts in place of the MLP.

    The weights of a token's experts are a softmax over the logits of these experts.
    """

    names: ClassVar[dict[str, str]] = {".mlp.": ".block_sparse_moe."}
    reads = frozenset({"num_local_experts"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        options = AttentionOptions(window=config.window())
        attention = SelfAttention(config, rotary_emb, options=options)
        stored = NUMBERED
        mlp = sparse_mlp(config, config.intermediate_size, stored=stored, renormalize=True)
        return DecoderLayer(config, attention, mlp)
