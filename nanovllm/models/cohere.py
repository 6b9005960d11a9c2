"""The Cohere families: attention and MLP in parallel, after one LayerNorm."""

from typing import Any, ClassVar

import torch

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.layernorm import LayerNorm
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import ParallelLayer, attention_biases


class CohereForCausalLM(DecoderForCausalLM):
    """Command R, Aya 23, Aya Expanse: attention and MLP in parallel after one LayerNorm, a factor
    on logits.
    """

    interleaved: ClassVar[bool] = True
    norm: ClassVar[dict[str, Any]] = {"layer": LayerNorm, "bias": False}
    aliases: ClassVar[dict[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_parallel_block": (True,),
        "use_qk_norm": (False,),
    }
    reads = frozenset({"logit_scale"})

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._logit_scale = config.number("logit_scale", 0.0625)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        window, rotates = self.window_of(config, index)
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope if rotates else None, config.head_dim),
            options=AttentionOptions(window=window),
            **attention_biases(config),
        )
        return ParallelLayer(config, attention, GatedMLP(config), one_norm=True, **self.norm)

    def window_of(self, config: ModelConfig, index: int) -> tuple[int | None, bool]:
        """Return the window of layer `index` in tokens, and whether it has RoPE."""
        return None, True

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden)
        return None if logits is None else logits * self._logit_scale


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B, Command A: Command R with a window in three of four layers; the fourth has no
    RoPE.
    """

    reads = frozenset({"logit_scale", "layer_types"})

    def window_of(self, config: ModelConfig, index: int) -> tuple[int | None, bool]:
        window = config.windows(config.size("sliding_window_pattern", 4))[index]
        return window, window is not None
