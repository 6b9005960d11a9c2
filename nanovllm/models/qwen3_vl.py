"""The text model of Qwen3-VL: Qwen3, whose three position numbers are equal for text."""

from nanovllm.models.parts import OTHER_MODALITIES
from nanovllm.models.qwen3 import Qwen3ForCausalLM


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3-VL, with pictures: Qwen3, whose three position numbers are equal for text."""

    reads = frozenset({"mrope_section", "mrope_interleaved"})
    left_out = OTHER_MODALITIES
