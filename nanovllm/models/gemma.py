"""The Gemma 2 and Gemma 3 families: norms on both sides, and windows."""

from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.kernels.torch_math import NORM_CENTRED
from nanovllm.models.decoder import DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import (
    GELU_TANH,
    OTHER_MODALITIES,
    SandwichForCausalLM,
    SandwichLayer,
    ScaledDecoder,
    attention_biases,
)


class Gemma2ForCausalLM(SandwichForCausalLM):
    """Gemma 2: norms on both sides, caps on scores and logits, a window in every other layer."""

    norm: ClassVar[dict[str, Any]] = {"kind": NORM_CENTRED}
    qk_norm = False
    interval = 2
    """Every layer whose number is a multiple of this has full attention."""
    only = GELU_TANH
    decoder = ScaledDecoder
    reads = frozenset(
        {
            *GELU_TANH,
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "layer_types",
        }
    )

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        layer_type = config.layer_types(self.interval)[index]
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope_of(layer_type), config.head_dim),
            qk_norm=self.qk_norm,
            norm_kind=NORM_CENTRED,
            options=AttentionOptions(
                scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
                window=config.windows(self.interval)[index],
                softcap=config.number("attn_logit_softcapping", 0.0),
            ),
            **attention_biases(config),
        )
        mlp = GatedMLP(config, activation="gelu_tanh")
        return SandwichLayer(config, attention, mlp, **self.norm)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 270M and 1B: norms on both sides, and of queries and keys; five of six layers have a
    window and separate rotary angles.
    """

    qk_norm = True
    left_out = OTHER_MODALITIES
    ignores = frozenset({"attn_logit_softcapping"})
    reads = (Gemma2ForCausalLM.reads | {"rope_parameters", "rope_local_base_freq"}) - ignores

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self.interval = config.size("sliding_window_pattern", 6)
        super().__init__(config, max_model_len)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 4B, 12B and 27B, with pictures."""

    ignores = Gemma3ForCausalLM.ignores | {"final_logit_softcapping"}
