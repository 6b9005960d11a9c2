"""Maps architectures to model families: files of this folder, and classes of the user's."""

import dataclasses
import importlib
import inspect
from typing import Any, NamedTuple

from torch import nn

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.hub import has_labels
from nanovllm.models.class_defaults import class_defaults, is_untied
from nanovllm.models.config_fields import architecture_of, check_one_label, text_fields
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.plugins import installed, load_class
from nanovllm.options.validation import shown

MODULES = {
    "AfmoeForCausalLM": "afmoe",
    "BailingHybridForCausalLM": "bailing_hybrid",
    "BambaForCausalLM": "bamba",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "BertModel": "bert",
    "Cohere2ForCausalLM": "cohere",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "FalconH1ForCausalLM": "falcon_h1",
    "GPT2LMHeadModel": "gpt",
    "GPTNeoXForCausalLM": "gpt",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3ForConditionalGeneration": "gemma",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite",
    "GraniteMoeSharedForCausalLM": "granite",
    "HunYuanDenseV1ForCausalLM": "llama",
    "KimiLinearForCausalLM": "kimi_linear",
    "LagunaForCausalLM": "laguna",
    "Lfm2ForCausalLM": "lfm",
    "Lfm2MoeForCausalLM": "lfm",
    "Lfm2VlForConditionalGeneration": "lfm",
    "Lfm3ForCausalLM": "lfm",
    "Lfm3VlForConditionalGeneration": "lfm",
    "LlamaForCausalLM": "llama",
    "MellumForCausalLM": "qwen3_moe",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "Mistral4ForCausalLM": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mistral",
    "MuseGlimmerForConditionalGeneration": "muse_glimmer",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_5",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "RobertaForMaskedLM": "bert",
    "RobertaForSequenceClassification": "bert",
    "RobertaModel": "bert",
    "SeedOssForCausalLM": "llama",
    "SmolLM3ForCausalLM": "llama",
    "XLMRobertaForSequenceClassification": "bert",
    "XLMRobertaModel": "bert",
}
"""The file of each architecture, which has a class of this name. The class's docstring begins with
"MODELS: LAYERS."; without ": " its layers are those of the class that it inherits from."""
_EAGLE3 = "LlamaForCausalLMEagle3"


class Supported(NamedTuple):
    """What the docstring of a family's class declares."""

    architecture: str
    family: str  # the file in this folder, without ".py"
    models: str  # the best-known models
    layers: str  # what its layers have, in a phrase


def supported(architecture: str, module: str | None = None) -> Supported:
    """Return what is declared of an architecture in `MODULES`, or of a family in `module`."""
    family = module or MODULES[architecture]
    declared = family_class(architecture) if module is None else _class(module, architecture)
    models = ""
    for cls in declared.__mro__:
        paragraph = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
        first, _, layers = " ".join(paragraph.split()).rstrip(".").partition(": ")
        models = models or first
        if layers:
            break
    return Supported(architecture, family, models, layers)


def family_class(architecture: str) -> type[DecoderForCausalLM]:
    """Return the class of an architecture in `MODULES`."""
    return _class(f"nanovllm.models.{MODULES[architecture]}", architecture)


def check_architecture(name: str) -> None:
    """Check that this architecture is implemented.

    Raises:
        UnsupportedModelError: no model file implements it, or it is only a draft head.
    """
    if name == _EAGLE3:
        raise UnsupportedModelError(
            f"architecture {name} is a draft head: name its target as the model, and the head in "
            "speculative_config"
        )
    if name not in MODULES:
        raise UnsupportedModelError(
            f"architecture {shown(name)} is not supported: `nanovllm models` lists those that are"
        )


def read_config(
    config: dict[str, Any], dtype: str = "auto", model_family: str | None = None
) -> ModelConfig:
    """Read the parsed config.json of a model. See `ModelConfig.from_hf`.

    Args:
        model_family: the option. An architecture that is not in `MODULES` may be the name of an
            installed plugin.

    Raises:
        UnsupportedModelError: as for `check_architecture`, or a setting is not implemented.
        CheckpointError: a field is missing or has an invalid value.
        ConfigError: the user's family cannot be loaded.
    """
    name = architecture_of(config)
    own = model_family or (None if name in MODULES else installed("family").get(name))
    if own is not None:
        return _read_own(config, dtype, own)
    if name not in MODULES and name.endswith("Model"):  # the checkpoint has no head
        with_head = f"{name.removesuffix('Model').removesuffix('Text')}ForCausalLM"
        name = with_head if with_head in MODULES else name
        config = {**config, "architectures": [name]}
    with_head = f"{name.removesuffix('ForSequenceClassification')}ForCausalLM"
    if name not in MODULES and name.endswith("ForSequenceClassification") and with_head in MODULES:
        return _read_labelled(config, dtype, with_head)
    check_architecture(name)
    return _read(config, dtype, family_class(name))


def _read_labelled(config: dict[str, Any], dtype: str, name: str) -> ModelConfig:
    """Read the config.json of a decoder of architecture `name` with a score in place of tokens."""
    family = family_class(name)
    found = _read({**config, "architectures": [name]}, dtype, family)
    if not has_labels(config):
        return found
    check_one_label(found.fields)
    if family.compute_logits is not DecoderForCausalLM.compute_logits:
        raise UnsupportedModelError(
            f"architecture {shown(architecture_of(config))} is not supported: {name} scales its "
            "logits"
        )
    return dataclasses.replace(found, has_label=True, tie_word_embeddings=False)


def _read_own(config: dict[str, Any], dtype: str, own: str) -> ModelConfig:
    """Read the config.json for a family of the user's, whatever architecture it names."""
    arguments = ("config", "max_model_len")
    family = load_class("model_family", own, DecoderForCausalLM, arguments)
    try:
        found = _read({**config, "architectures": [family.__name__]}, dtype, family)
    except CheckpointError as error:
        raise type(error)(f"model_family {own}: {error}") from error
    return dataclasses.replace(found, module=own.partition(":")[0])


def _read(config: dict[str, Any], dtype: str, family: type[DecoderForCausalLM]) -> ModelConfig:
    classes = [cls.__name__ for cls in family.__mro__]
    fields = text_fields(config)
    text_type = fields.get("model_type") if fields is not config else None
    if fields is config and classes[0].endswith("ForConditionalGeneration"):
        if fields.get("hidden_size") is None:
            raise CheckpointError("config.json has no text_config, the fields of the text model")
    elif config.get("tie_word_embeddings") is None and is_untied(classes):
        config = {**config, "tie_word_embeddings": False}
    ignores = set(family.ignores)
    if fields.get("rope_parameters") is None:
        ignores.add("rope_parameters")  # null counts as absent
    given = {key: value for key, value in fields.items() if key not in ignores}
    defaults = class_defaults(classes, text_type, given) | family.defaults
    found = ModelConfig.from_hf(config, dtype, defaults, family.reads, family.aliases, ignores)
    return dataclasses.replace(found, max_position=found.max_position - family.skipped_positions)


def model_class(config: ModelConfig) -> type[nn.Module]:
    """Return the class that implements `config.architecture`.

    Raises:
        UnsupportedModelError: as for `check_architecture`.
    """
    if config.module is None:
        check_architecture(config.architecture)
        return family_class(config.architecture)
    return _class(config.module, config.architecture)


def user_family(config: ModelConfig) -> str | None:
    """Return the name of a model family of the user's, for errors; None for ours."""
    if config.module is None or config.module.startswith("nanovllm.features."):
        return None
    return f'model family "{config.module}:{config.architecture}"'


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
