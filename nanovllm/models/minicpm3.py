"""The MiniCPM3 family: latent attention, and multipliers."""

from typing import ClassVar

from nanovllm.models.decoder import DecoderLayer, GatedMLP
from nanovllm.models.mla_parts import LatentAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import MultipliedForCausalLM, Multipliers


class MiniCPM3ForCausalLM(MultipliedForCausalLM):
    """MiniCPM3-4B: latent attention; factors on embedding, residual and logits."""

    aliases: ClassVar[dict[str, str]] = {"head_dim": "qk_rope_head_dim"}

    def read_multipliers(self, config: ModelConfig) -> Multipliers:
        depth = config.num_layers**0.5
        residual = config.number("scale_depth", depth) / depth
        base = config.number("dim_model_base", config.hidden_size)
        return Multipliers(config.number("scale_emb", 12.0), residual, config.hidden_size / base)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = LatentAttention(config, rotary_emb, bias=config.flag("attention_bias"))
        return DecoderLayer(
            config, attention, GatedMLP(config, bias=config.flag("mlp_bias")), **self.norm
        )
