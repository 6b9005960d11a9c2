"""The gpt-oss family: experts with biases, and attention with sinks and, in every other layer, a
window.
"""

from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.layers.experts import PER_EXPERT, StoredExperts
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer
from nanovllm.models.expert_parts import sparse_mlp
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import SinkAttention, attention_biases

_MERGED = StoredExperts(linears=None, transposed=True, interleaved=True)
"""The form of the published checkpoints. A config with "split_experts", a field of nanovllm's,
comes from a GGUF file, which stores gates and ups separately."""


class GptOssForCausalLM(DecoderForCausalLM):
    """gpt-oss 20b and 120b: experts with biases, attention sinks, a window in every other layer."""

    norm: ClassVar[dict[str, Any]] = {"kind": NORM_WIDE}
    names: ClassVar[dict[str, str]] = {"mlp.gate.": "mlp.router."}
    reads = frozenset({"layer_types", "num_local_experts", "num_experts"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = SinkAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            options=AttentionOptions(window=config.windows(2)[index], sinks=True),
            **attention_biases(config, default=True),
        )
        mlp = sparse_mlp(
            config,
            config.intermediate_size,
            bias=True,
            activation="swiglu_oai",
            stored=PER_EXPERT if config.flag("split_experts") else _MERGED,
            renormalize=True,
        )
        return DecoderLayer(config, attention, mlp, **self.norm)
