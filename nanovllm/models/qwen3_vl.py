"""The text models of Qwen3-VL: Qwen3's, whose three position numbers are equal for text."""

from nanovllm.layers.experts import PER_EXPERT, SparseMLP, StoredExperts
from nanovllm.models.expert_parts import sparse_mlp
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM

_READS = frozenset({"mrope_section", "mrope_interleaved"})
_STORED = StoredExperts(linears=None, transposed=True, either=True)


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3-VL, with pictures: Qwen3, whose three position numbers are equal for text."""

    reads = _READS
    left_out = OTHER_MODALITIES


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """Qwen3-VL-30B-A3B and 235B-A22B, with pictures: Qwen3-MoE, whose three position numbers are
    equal for text; the router's weights are a softmax over the chosen experts.
    """

    reads = _READS | Qwen3MoeForCausalLM.reads
    left_out = OTHER_MODALITIES

    def make_experts(self, config: ModelConfig) -> SparseMLP:
        size = config.size("moe_intermediate_size")
        stored = PER_EXPERT if config.flag("split_experts") else _STORED  # GGUF files' own field
        return sparse_mlp(config, size, stored=stored, renormalize=True)
