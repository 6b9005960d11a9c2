"""The Seed-OSS family: Llama, with a separate switch for the bias of o_proj."""

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS-36B: Llama; q, k and v have a bias unless the config says otherwise."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            bias=config.flag("attention_bias", default=True),
            output_bias=config.flag("attention_out_bias"),
        )
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.flag("mlp_bias")))
