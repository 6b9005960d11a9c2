"""The Gemma 3 family, text model only: Gemma 2 with norms of queries and keys, and no caps."""

from nanovllm.models.gemma2 import Gemma2ForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES


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
    """Gemma 3 4B, 12B and 27B, without images."""

    ignores = Gemma3ForCausalLM.ignores | {"final_logit_softcapping"}
