"""The GLM-4.7-Flash family: DeepSeek-V3 without groups of experts."""

from typing import Any, ClassVar

from nanovllm.models.deepseek import DeepseekV3ForCausalLM


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: latent attention; experts chosen by sigmoids plus a bias, and one that all
    tokens share.
    """

    defaults: ClassVar[dict[str, Any]] = {"first_k_dense_replace": 1}
    ignores = frozenset({"first_k_dense_replace"})
