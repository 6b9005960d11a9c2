"""The text model of LFM3-VL: LFM3."""

from nanovllm.models.lfm3 import Lfm3ForCausalLM
from nanovllm.models.parts import OTHER_MODALITIES


class Lfm3VlForConditionalGeneration(Lfm3ForCausalLM):
    """LFM3-VL 2B, without images."""

    left_out = OTHER_MODALITIES
