"""The Qwen3-MoE family: Qwen3 with a mixture of experts in most layers."""

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.expert_parts import is_dense, sparse_mlp
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import attention_biases


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
        size = config.size("moe_intermediate_size")
        renormalize = config.flag("norm_topk_prob")
        return DecoderLayer(config, attention, sparse_mlp(config, size, renormalize=renormalize))
