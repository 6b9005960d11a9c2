"""The GLM-4.7-Flash family: DeepSeek-V3 without groups of experts."""

from typing import Any, ClassVar

from nanovllm.models.deepseek import DeepseekV3ForCausalLM


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: latent attention; experts chosen by sigmoids plus a bias, and one that all
    tokens share.
    """

    defaults: ClassVar[dict[str, Any]] = {
        **DeepseekV3ForCausalLM.defaults,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
    }
    ignores = frozenset()
