"""The GPT-2 and GPT-NeoX families: LayerNorms, and an MLP without a gate."""

from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.layernorm import LayerNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.pieces import PiecedLinear, head_rows
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import (
    ParallelLayer,
    PlainMLP,
    PositionedDecoder,
    attention_biases,
    named_activation,
)


class GPT2LMHeadModel(DecoderForCausalLM):
    """GPT-2, DistilGPT2, DialoGPT: learned positions, LayerNorms, an MLP without a gate."""

    names: ClassVar[dict[str, str]] = {
        "model.embed_tokens.": "transformer.wte.",
        "model.positions.": "transformer.wpe.",
        "model.layers.": "transformer.h.",
        "model.norm.": "transformer.ln_f.",
        "input_layernorm.": "ln_1.",
        "post_attention_layernorm.": "ln_2.",
        "self_attn.qkv_proj.": "attn.c_attn.",
        "self_attn.o_proj.": "attn.c_proj.",
        "mlp.up_proj.": "mlp.c_fc.",
        "mlp.down_proj.": "mlp.c_proj.",
    }
    published: ClassVar[dict[str, str]] = {"transformer.": ""}  # as in the files of gpt2 itself
    left_out = (".attn.bias", ".attn.masked_bias")  # masks
    norm: ClassVar[dict[str, Any]] = {"layer": LayerNorm}
    decoder = PositionedDecoder
    aliases: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    ignores = frozenset({"intermediate_size", "num_key_value_heads", "head_dim"})

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        for module in self.modules():
            if isinstance(module, LinearBase):
                module.transposed = True

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        scale = config.head_dim**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
        if config.flag("scale_attn_by_inverse_layer_idx"):
            scale /= index + 1
        attention = SelfAttention(
            config,
            self.rotary_emb(None, config.head_dim),
            output_bias=True,
            options=AttentionOptions(scale=scale),
            bias=True,
            fused=True,
        )
        activation = named_activation(config, "activation_function", "gelu_new")
        return DecoderLayer(config, attention, PlainMLP(config, activation, bias=True), **self.norm)


class HeadwiseAttention(SelfAttention):
    """Attention whose checkpoint has one linear: query, key and value of a head, then the next."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding, **biases: Any) -> None:
        super().__init__(config, rotary_emb, **biases)
        size = config.head_dim
        pieces = [
            piece
            for part in range(3)
            for piece in head_rows("query_key_value", config.num_heads, 3 * size, part * size, size)
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
    published: ClassVar[dict[str, str]] = {"lm_head.": "embed_out."}
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
