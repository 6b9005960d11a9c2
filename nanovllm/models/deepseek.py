"""The DeepSeek families V2 and V3: latent attention, and experts after the first layers."""

from typing import Any, ClassVar

from torch import nn

from nanovllm.models.expert_parts import deepseek_mlp, expert_groups
from nanovllm.models.mla_parts import LatentForCausalLM
from nanovllm.models.model_config import ModelConfig


class DeepseekV3ForCausalLM(LatentForCausalLM):
    """DeepSeek-V3, R1 and V3.1, Kimi K2: latent attention; experts in groups, chosen by sigmoids
    plus a bias, and one that all tokens share.
    """

    ignores = frozenset({"mlp_layer_types"})
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    }


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V2, V2-Lite and Coder-V2: latent attention; experts, in groups if the config says
    so, chosen by a softmax, and those that all tokens share.
    """

    ignores = DeepseekV3ForCausalLM.ignores | {"rope_interleave"}
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
    }

    def make_experts(self, config: ModelConfig) -> nn.Module:
        grouped = config.fields.get("topk_method") == "group_limited_greedy"
        return deepseek_mlp(
            config,
            sigmoid=False,
            choice_bias=False,
            renormalize=False,
            groups=expert_groups(config, best=1) if grouped else None,
        )
