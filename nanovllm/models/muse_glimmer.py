"""The Muse Glimmer family, text model only."""

from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.kernels.torch_math import NORM_CENTRED, NORM_WIDE
from nanovllm.models.decoder import Decoder, DecoderLayer, GatedMLP
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import (
    OTHER_MODALITIES,
    GatedAttention,
    NormedEmbedding,
    SandwichForCausalLM,
    SandwichLayer,
    UnweightedNorm,
    attention_biases,
)


class MuseGlimmerForConditionalGeneration(SandwichForCausalLM):
    """Muse Glimmer, without pictures: norms on both sides, gated attention; three of four layers
    have a window, the fourth has no RoPE.
    """

    left_out = OTHER_MODALITIES
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_CENTRED}
    reads = frozenset(
        {"qk_scale_factor", "output_multiplier", "final_logit_softcapping", "layer_types"}
    )

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        slides = (config.num_layers - 1 - index) % 4 > 0
        thetas = config.per_layer("layer_rope_theta")
        rotates = bool(thetas[index]) if thetas else slides
        if config.fields.get("layer_types"):
            slides = config.layer_types(4)[index] == "sliding_attention"
        window = config.size("sliding_window") if slides else None
        scale = config.number("qk_scale_factor", 1.0) * config.head_dim**-0.5
        attention = GatedAttention(
            config,
            self.rotary_emb(config.rope if rotates else None, config.head_dim),
            options=AttentionOptions(scale=scale, window=window),
            **attention_biases(config),
        )
        attention.q_norm = attention.k_norm = UnweightedNorm(config.head_dim, config.rms_norm_eps)
        eps = config.number("post_norm_eps", 1e-8)
        return SandwichLayer(config, attention, GatedMLP(config), eps_after=eps, **self.norm)

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        decoder = Decoder(config, layers, kind=NORM_WIDE)
        decoder.embed_tokens = NormedEmbedding(config)
        return decoder
