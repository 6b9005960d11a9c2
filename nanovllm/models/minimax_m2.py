"""The MiniMax-M2 family: norms over all heads together, half of each head rotates, experts."""

from typing import Any, ClassVar

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer
from nanovllm.models.expert_parts import BY_SIGMOID, NUMBERED, sparse_mlp
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import WideNormAttention


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    """MiniMax-M2: norms over all query heads and all key heads; half of each head rotates; experts
    in all layers, chosen by sigmoids.
    """

    names: ClassVar[dict[str, str]] = {
        "mlp.expert_bias": "block_sparse_moe.e_score_correction_bias",
        "mlp.": "block_sparse_moe.",
    }
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
    }
    reads = frozenset({"num_local_experts", "partial_rotary_factor"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = WideNormAttention(config, self.rotary_emb(config.rope, config.head_dim))
        mlp = sparse_mlp(
            config,
            config.intermediate_size,
            stored=NUMBERED,
            wide=True,  # published weights of the router are in float32
            **BY_SIGMOID,
        )
        return DecoderLayer(config, attention, mlp)
