"""The LFM2 family with experts."""

from typing import Any, ClassVar

from torch import nn

from nanovllm.layers.experts import MAX_EXPERTS, Experts, Router, SparseMLP, StoredExperts
from nanovllm.models.config_fields import config_size
from nanovllm.models.decoder import GatedMLP
from nanovllm.models.lfm2 import Lfm2ForCausalLM
from nanovllm.models.lfm2_parts import DEFAULTS
from nanovllm.models.model_config import ModelConfig

_LINEARS = ("w1", "w3", "w2")


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2-8B-A1B: LFM2 with experts in place of the MLP behind the first layers."""

    aliases: ClassVar[dict[str, str]] = {
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embedding",
    }
    defaults: ClassVar[dict[str, Any]] = {
        **DEFAULTS,
        "num_dense_layers": 2,
        "use_expert_bias": True,
        "norm_topk_prob": True,
    }
    reads = frozenset({"layer_types", "num_experts"})

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        if index < config.count("num_dense_layers"):
            return GatedMLP(config)
        num_experts = config_size(config.fields, "num_experts", 32, high=MAX_EXPERTS)
        router = Router(
            config.hidden_size,
            num_experts,
            config_size(config.fields, "num_experts_per_tok", 4, high=num_experts),
            renormalize=config.flag("norm_topk_prob"),
            factor=config.number("routed_scaling_factor", 1.0),
            sigmoid=True,
            choice_bias=config.flag("use_expert_bias"),
        )
        size, stored = config.size("moe_intermediate_size"), StoredExperts(linears=_LINEARS)
        return SparseMLP(router, Experts(num_experts, config.hidden_size, size, stored=stored))
