"""The LFM2 family: most layers are short convolutions, the others have attention."""

import dataclasses
from typing import Any, ClassVar

from torch import nn

from nanovllm.layers.short_conv import ShortConv
from nanovllm.models.config_fields import config_size
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.hybrid_parts import MAX_TAPS, MixerLayer
from nanovllm.models.lfm2_parts import DEFAULTS, NAMES, adjusted_size, lfm2_types
from nanovllm.models.model_config import ModelConfig


class Lfm2ForCausalLM(DecoderForCausalLM):
    """LFM2 and LFM2.5 350M to 2.6B: most layers are short convolutions, which keep a state; the
    others have attention with norms of queries and keys.
    """

    names: ClassVar[dict[str, str]] = NAMES
    aliases: ClassVar[dict[str, str]] = {
        "rms_norm_eps": "norm_eps",
        "intermediate_size": "block_ff_dim",
        "tie_word_embeddings": "tie_embedding",
    }
    defaults: ClassVar[dict[str, Any]] = {
        **DEFAULTS,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    }
    reads = frozenset({"layer_types"})

    def make_layer(
        self, config: ModelConfig, index: int, before: list[DecoderLayer]
    ) -> DecoderLayer:
        mlp = self.make_mlp(config, index)
        if lfm2_types(config)[index] == "conv":
            taps = config_size(config.fields, "conv_L_cache", high=MAX_TAPS, low=2)
            mixer = ShortConv(config.hidden_size, taps, bias=config.flag("conv_bias"))
            return MixerLayer(config, mixer, mlp)
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        return DecoderLayer(config, SelfAttention(config, rotary_emb, qk_norm=True), mlp)

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        """Return the MLP of layer `index`, or its experts."""
        return GatedMLP(dataclasses.replace(config, intermediate_size=adjusted_size(config)))
