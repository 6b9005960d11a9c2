"""The EXAONE 4 family: norms only after attention and MLP; no RoPE in full attention."""

import re
from typing import ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.errors import UnsupportedModelError
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import SANDWICH, SandwichLayer
from nanovllm.options.validation import shown


class Exaone4ForCausalLM(DecoderForCausalLM):
    """EXAONE 4 1.2B and 32B: norms only after attention and MLP; in the 32B three of four layers
    have a window, the fourth has no RoPE.
    """

    names: ClassVar[dict[str, str]] = SANDWICH
    reads = frozenset({"layer_types"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        hybrid = config.fields.get("sliding_window") is not None
        interval = _interval(config) if hybrid else 0
        window = config.windows(interval)[index]
        rope = None if hybrid and window is None else config.rope
        attention = SelfAttention(
            config,
            self.rotary_emb(rope, config.head_dim),
            qk_norm=True,
            options=AttentionOptions(window=window),
        )
        return SandwichLayer(config, attention, GatedMLP(config), before=False)


def _interval(config: ModelConfig) -> int:
    """Return how often a layer has full attention: a number, or a pattern such as "LLLG"."""
    pattern = config.fields.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and not re.fullmatch("L+G", pattern):
        raise UnsupportedModelError(
            f"config.json: sliding_window_pattern {shown(pattern)} is not supported (such as LLLG)"
        )
    return len(pattern) if isinstance(pattern, str) else config.size("sliding_window_pattern", 4)
