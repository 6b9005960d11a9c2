"""What a checkpoint says about its vectors and scores: the files of sentence-transformers.

None of them is trusted.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.files import (
    MAX_JSON_BYTES,
    check_file,
    is_gguf,
    parse_object,
    read_json,
)
from nanovllm.loading.hub import Checkpoint
from nanovllm.options.validation import check_choice, check_int, shown

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_MODES = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
"""Poolings by sentence-transformers' names."""
_OLD_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Poolings by the fields that older files set to true."""
_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}
_ACTIVATIONS = ("sigmoid", "identity")
_MOST_PROMPTS = 1024
_QWEN3_RERANKER = "qwen3-reranker"


@dataclasses.dataclass(frozen=True)
class PoolingSettings:
    """How a checkpoint makes vectors of texts, and scores of pairs of texts."""

    pooling: str = "last"
    normalize: bool = True
    similarity: str = "cosine"
    """How two vectors are compared."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By name: what is written before a text."""
    default_prompt_name: str | None = None
    answers: tuple[str | int, str | int] | None = None
    """Of a reranker: the tokens, or their texts, with which it says that a document does not meet a
    query, and that it does. None: scores are the similarity of vectors."""
    activation: str | None = None
    """Of a cross-encoder: what makes a score of its logit, "sigmoid" or "identity"."""


def read_settings(checkpoint: Checkpoint, model: str, pooling: str = "last") -> PoolingSettings:
    """Return what the checkpoint's files say; the defaults where they say nothing.

    Args:
        model: the model's name, or its directory.
        pooling: the default.

    Raises:
        CheckpointError: a file is invalid.
        UnsupportedModelError: a file asks for what is not implemented.
    """
    path = checkpoint.path
    answers = _named_answers(checkpoint.config, model)
    if is_gguf(path):
        return PoolingSettings(answers=answers)
    prompts = _read(path, "config_sentence_transformers.json")
    settings = PoolingSettings(
        pooling=pooling,
        similarity=_similarity(prompts),
        prompts=_prompts(prompts),
        default_prompt_name=prompts.get("default_prompt_name"),
        answers=answers,
        activation=_activation(checkpoint.config),
    )
    name = settings.default_prompt_name
    if name is not None and not (isinstance(name, str) and name in settings.prompts):
        raise CheckpointError(
            f"config_sentence_transformers.json: default_prompt_name {shown(name)} is none of its "
            f"prompts ({', '.join(map(shown, settings.prompts)) or 'there are none'})"
        )
    return _with_modules(path, settings)


def _with_modules(path: Path, settings: PoolingSettings) -> PoolingSettings:
    """Return `settings` with what modules.json says, if there is one."""
    if not check_file(path, "modules.json", MAX_JSON_BYTES):
        return settings
    changes: dict[str, Any] = {"normalize": False}
    listed = (path / "modules.json").read_bytes()
    modules = parse_object(b'{"modules": ' + listed + b"}", f"{path}/modules.json")["modules"]
    if not isinstance(modules, list):
        raise CheckpointError(f"{path}/modules.json must hold a list, is {shown(modules)}")
    for module in modules:
        kind, folder = (
            module.get(key) if isinstance(module, dict) else None for key in ("type", "path")
        )
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise CheckpointError(
                f"modules.json: a module must have a type and a path, is {shown(module)}"
            )
        if ".." in PurePosixPath(folder).parts or folder.startswith("/"):
            raise CheckpointError(
                f"modules.json: path {shown(folder)} must be a folder of the checkpoint"
            )
        match kind.rpartition(".")[2]:
            case "Transformer":
                pass
            case "Normalize":
                changes["normalize"] = True
            case "Pooling":
                changes["pooling"] = _pooling(_read(path, f"{folder}/config.json"), folder)
            case "LogitScore":
                changes["answers"] = _answers(_read(path, f"{folder}/config.json"), folder)
            case other:
                raise UnsupportedModelError(
                    f"modules.json: the module {shown(other)} is not supported (only Transformer, "
                    "Pooling, Normalize, LogitScore)"
                )
    return dataclasses.replace(settings, **changes)


def _pooling(config: dict[str, Any], folder: str) -> str:
    """Return the one pooling that a config.json of a module names."""
    name = f"{folder}/config.json"
    mode = config.get("pooling_mode")
    modes = mode if isinstance(mode, list) else [] if mode is None else [mode]
    modes = modes or [mode for field, mode in _OLD_MODES.items() if config.get(field) is True]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"{name}: pooling {', '.join(map(shown, modes)) or 'without a mode'} is not supported "
            f"(only one of {', '.join(_MODES)})"
        )
    if config.get("include_prompt") is False and modes[0] == "mean":
        raise UnsupportedModelError(
            f"{name}: include_prompt false is not supported (only true): the mean would leave out "
            "the prompt's tokens"
        )
    return _MODES[modes[0]]


def _answers(config: dict[str, Any], folder: str) -> tuple[int, int]:
    found = [
        check_int(CheckpointError, f"{folder}/config.json: {key}", config.get(key), 0)
        for key in ("false_token_id", "true_token_id")
    ]
    return found[0], found[1]


def _named_answers(config: dict[str, Any], model: str) -> tuple[str, str] | None:
    """Return the answers of a reranker by vLLM's field of config.json, or by the model's name."""
    given = config.get("classifier_from_token")
    if given is not None:
        if not (isinstance(given, list) and len(given) == 2 and {*map(type, given)} == {str}):
            raise CheckpointError(
                "config.json: classifier_from_token must be a list of two strings, such as "
                f'["no", "yes"], is {shown(given)}'
            )
        return given[0], given[1]
    is_reranker = _QWEN3_RERANKER in Path(model).name.lower()
    return ("no", "yes") if is_reranker else None


def _activation(config: dict[str, Any]) -> str | None:
    """Return what makes a score of a cross-encoder's logit, as sentence-transformers does: what the
    config.json names, else a sigmoid; None for another model.
    """
    if "ForSequenceClassification" not in str(config.get("architectures")):
        return None
    nested = config.get("sentence_transformers")
    fields = {**config, **(nested if isinstance(nested, dict) else {})}
    for key in ("activation_fn", "sbert_ce_default_activation_function"):
        if (found := fields.get(key)) is not None:
            name = str(found).rpartition(".")[2].lower()
            return check_choice(UnsupportedModelError, f"config.json: {key}", name, _ACTIVATIONS)
    return "sigmoid"


def _similarity(config: dict[str, Any]) -> str:
    found = config.get("similarity_fn_name")
    if found is None:
        return "cosine"
    name = "config_sentence_transformers.json: similarity_fn_name"
    return check_choice(CheckpointError, name, found, SIMILARITIES)


def _prompts(config: dict[str, Any]) -> dict[str, str]:
    found = config.get("prompts")
    found = {} if found is None else found
    if (
        not isinstance(found, dict)
        or len(found) > _MOST_PROMPTS
        or not all(isinstance(text, str) for text in found.values())
    ):
        raise CheckpointError(
            "config_sentence_transformers.json: prompts must be texts by name, is " + shown(found)
        )
    return found


def _read(path: Path, name: str) -> dict[str, Any]:
    """Return a JSON file of the checkpoint; {} if there is none."""
    return read_json(path / name) if check_file(path, name) else {}
