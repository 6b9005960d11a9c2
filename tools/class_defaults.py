"""Writes the values of transformers for fields that a config.json lacks, in
nanovllm/models/class_defaults.json: `python -m tools.class_defaults`.
"""

import dataclasses
import json
import textwrap
import typing
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nanovllm.models.class_defaults import PATH
from nanovllm.models.registry import MODULES

_MODELS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
_OTHERS = ("gpt-sw3", "internlm3", "iquestcoder", "qwen3_5", "qwen3_5_moe", "shieldgemma2")
"""Model types that share a class with the one whose defaults count."""
NO_ARITHMETIC = {field.name for field in dataclasses.fields(PreTrainedConfig)}
NO_ARITHMETIC |= {"use_cache", "initializer_range"}
NO_ARITHMETIC |= {"rescale_prenorm_residual", "output_router_logits", "pretraining_tp"}
NO_ARITHMETIC |= {"router_aux_loss_coef", "router_jitter_noise", "num_logits_to_keep"}
NO_ARITHMETIC |= {"num_nextn_predict_layers", "num_mtp_layers", "moe_shared_expert_overlap"}
NO_ARITHMETIC |= {"mamba_chunk_size", "chunk_size", "mamba_ssm_cache_dtype", "z_loss_coefficient"}
NO_ARITHMETIC |= {"use_mamba_kernels", "reorder_and_upcast_attn"}
_PARTS = ("_token_id", "dropout", "pdrop", "summary_", "mtp_", "time_step_")
"""Of the names of fields that change no logits."""


def classes_of() -> dict[str, type[PreTrainedConfig]]:
    """Return the class of each architecture."""
    found: dict[str, type[PreTrainedConfig]] = {}
    for models in _MODELS:
        for kind, architecture in models.items():
            if architecture in MODULES and not (architecture in found and kind in _OTHERS):
                found[str(architecture)] = CONFIG_MAPPING[kind]
    return dict(sorted(found.items()))


def text_class(cls: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the class of the text model."""
    spec = cls.sub_configs_defaults.get("text_config")
    found: type[PreTrainedConfig] = cls if spec is None else CONFIG_MAPPING[spec.model_type]
    return found


def is_arithmetic(name: str) -> bool:
    """Return whether the field of this name changes what a model computes."""
    return name not in NO_ARITHMETIC and not any(part in name for part in _PARTS)


def fields_of(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the class's values of fields. A name ends with "?" if the field may be null."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if is_arithmetic(field.name) and field.default is not None:
            null = "?" if type(None) in typing.get_args(field.type) else ""
            found[f"{field.name}{null}"] = field.default
    found.pop("rope_theta", None)
    return found | _rope(cls)


def _rope(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the rotary settings without any in config.json, which transformers computes."""
    whole = getattr(cls(), "rope_parameters", None)
    if not whole:
        return {}
    theta = cls.default_theta
    if isinstance(theta, dict):
        return {"rope_theta?": theta["global"], "rope_local_base_freq": theta["local"]}
    if whole.get("rope_type") == "default":
        names = {"rope_theta": "rope_theta?", "partial_rotary_factor": "partial_rotary_factor?"}
        if cls.model_type == "gpt_neox":
            names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        return {own: whole[name] for name, own in names.items() if whole.get(name, 1.0) != 1.0}
    plain = {"rope_type": "default", "rope_theta": theta}
    if all(settings == plain for settings in whole.values()):  # for each type of layers
        return {"rope_theta?": theta}
    whole.pop("max_position_embeddings", None)
    if cls(rope_theta=1.0).rope_parameters.get("rope_theta") == 1.0:
        del whole["rope_theta"]  # that of config.json itself counts
    if "qk_nope_head_dim" in cls.__dataclass_fields__:
        whole.pop("partial_rotary_factor", None)  # computed from sizes
    return {"rope_theta?": theta, "rope_parameters?": whole}


def table() -> str:
    """Return the text of the file."""
    classes = classes_of()
    texts = {architecture: text_class(cls) for architecture, cls in classes.items()}
    types = {architecture: cls.model_type for architecture, cls in texts.items()}
    untied = {
        architecture: True
        for architecture, cls in classes.items()
        if cls is not texts[architecture] and not getattr(cls, "tie_word_embeddings", False)
    }
    blocks = [_block("architectures", types), _block("untied", untied)]
    rows = {cls.model_type: cls for cls in texts.values()}
    for kind, cls in sorted(rows.items()):
        blocks.append(_block(kind, fields_of(cls)))
        if cls.attribute_map:
            blocks.append(_block(f"{kind} synonyms", cls.attribute_map))
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _block(name: str, values: dict[str, Any]) -> str:
    items = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    glued = ", ".join(item.replace(" ", "\0") for item in items)
    lines = textwrap.wrap(glued, 96, break_long_words=False, break_on_hyphens=False)
    body = "\n".join(f"  {line}" for line in lines).replace("\0", " ")
    return f"{json.dumps(name)}: {{\n{body}\n}}"


if __name__ == "__main__":
    PATH.write_text(table(), "utf-8")
