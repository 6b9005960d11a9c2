"""The GPT-NeoX family: attention and MLP in parallel, LayerNorms, an MLP without a gate."""

from typing import Any, ClassVar

from nanovllm.layers.layernorm import LayerNorm
from nanovllm.layers.pieces import PiecedLinear, TensorRows
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import ParallelLayer, PlainMLP, attention_biases, named_activation
from nanovllm.utils.distributed import tensor_parallel


class HeadwiseAttention(SelfAttention):
    """Attention whose checkpoint has one linear: query, key and value of a head, then the next."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding, **biases: Any) -> None:
        super().__init__(config, rotary_emb, **biases)
        size = config.head_dim
        heads = self.qkv_proj.num_heads
        first = heads * tensor_parallel().rank
        pieces = [
            TensorRows(
                "query_key_value", 3 * config.num_heads * size, (3 * head + part) * size, size
            )
            for part in range(3)
            for head in range(first, first + heads)
        ]
        self.qkv_proj = PiecedLinear(config.hidden_size, pieces, bias=biases["bias"])  # type: ignore[assignment]


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """Pythia, GPT-NeoX-20B: LayerNorms, an MLP without a gate, beside attention or after it; RoPE
    covers part of a head.
    """

    names: ClassVar[dict[str, str]] = {
        "model.embed_tokens.": "gpt_neox.embed_in.",
        "model.layers.": "gpt_neox.layers.",
        "model.norm.": "gpt_neox.final_layer_norm.",
        "self_attn.o_proj.": "attention.dense.",
        "self_attn.": "attention.",
        "mlp.up_proj.": "mlp.dense_h_to_4h.",
        "mlp.down_proj.": "mlp.dense_4h_to_h.",
    }
    left_out = (".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq")
    norm: ClassVar[dict[str, Any]] = {"layer": LayerNorm}
    aliases: ClassVar[dict[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    reads = frozenset({"hidden_act", "partial_rotary_factor"})
    ignores = frozenset({"num_key_value_heads", "rope_theta", "partial_rotary_factor"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = HeadwiseAttention(config, rotary_emb, **attention_biases(config, default=True))
        mlp = PlainMLP(config, named_activation(config), bias=True)
        parallel = config.flag("use_parallel_residual", default=True)
        return (ParallelLayer if parallel else DecoderLayer)(config, attention, mlp, **self.norm)

    def published_names(self, name: str) -> tuple[str, ...]:
        return (name.replace("lm_head.", "embed_out."),)
