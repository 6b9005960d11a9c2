"""`SamplingParams` and its parts, in the place that nano-vllm and vLLM have them."""

from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.options.structured_outputs import StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
