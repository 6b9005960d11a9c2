"""`MTPConfig`: what a checkpoint says of the layer that it has for drafts (multi-token prediction).

Its tensors are those whose names begin with "mtp.", in the same files as the target's, or they are
those of a layer after the target's last one, as in DeepSeek-V3.
"""

import dataclasses
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.tensor_files import read_header
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import shown
from nanovllm.worker.model_loader import NetworkSpec, check_weights

PREFIX = "mtp."
AFTER = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Architectures of targets whose layer comes after the last one."""
FAMILIES = (
    *AFTER,
    "MellumForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
)
"""Architectures of targets whose layer is of the form that mtp_head.py has."""
_ONLY: dict[str, Any] = {
    "mtp_num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
"""Settings of which one value is implemented, which is also the default."""
_SUFFIXES = ("_scale", "_scale_inv", "_packed", ".qweight", "_blocks")
"""Ends of the names of tensors that belong to a quantised weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(ModelConfig):
    """The target's sizes and settings, of one layer: with full attention, unless they say more."""

    family: str
    """The target's architecture."""
    num_target_layers: int

    @property
    def prefix(self) -> str:
        """Return what the names of the layer's tensors begin with."""
        after = f"model.layers.{self.num_target_layers}."
        return after if self.family in AFTER else PREFIX


def check_mtp(target: NetworkSpec) -> NetworkSpec:
    """Return what the ranks load of the checkpoint of `target` for its drafts.

    The weights have the form in which the checkpoint has them: the option `quantization` is for
    the target alone.

    Raises:
        UnsupportedModelError: the model has no such layer, or one of another form.
        CheckpointError: its tensors are missing, or as for `check_weights`.
    """
    names = [name for file in target.files for name in read_header(file)]
    config = _read(target.model_config)
    own = [name for name in names if name.startswith(config.prefix)]
    if not any(name.endswith(_SUFFIXES) for name in own):
        config = dataclasses.replace(config, quantization_config=None)
    if target.files:
        if not own:
            needed = f"{PREFIX}fc.weight, {PREFIX}norm.weight, {PREFIX}layers.0.*"
            if config.prefix != PREFIX:
                needed = f"{config.prefix}eh_proj.weight, {config.prefix}self_attn.*"
            raise CheckpointError(
                f"{_place(target.files[0])}: speculative_config: method mtp needs the tensors "
                f"{needed} and others, but the checkpoint has none whose name begins with "
                f"{config.prefix}"
            )
        check_weights(config, target.files)
    options = dataclasses.replace(target.config, quantization="none", speculative_config=None)
    return NetworkSpec(options, config, target.files)


def _place(file: Path) -> Path:
    return file if file.suffix == ".gguf" else file.parent


def _read(target: ModelConfig) -> MTPConfig:
    if target.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"speculative_config: method mtp is not supported for {target.architecture} (only "
            f"{', '.join(FAMILIES)})"
        )
    for key, only in _ONLY.items():
        value = target.fields.get(key)
        if value not in (None, 0, only):  # 0: there is none, and no tensor of it
            raise UnsupportedModelError(
                f"config.json: {key} {shown(value)} is not supported with method mtp (only {only})"
            )
    layer: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"],
    }
    if target.architecture == "MellumForCausalLM":
        layer["layer_types"] = target.fields.get("mtp_layer_types") or ["sliding_attention"]
        layer["mlp_layer_types"] = target.fields.get("mtp_mlp_layer_types") or ["sparse"]
    module = "nanovllm.features.speculation.proposers.mtp_head"
    settings = vars(target) | {"architecture": "MTPHead", "num_layers": 1, "module": module}
    return MTPConfig(
        **settings | {"fields": target.fields | layer},
        family=target.architecture,
        num_target_layers=target.num_layers,
    )
