"""What a checkpoint says about its vectors and scores: config.json, a GGUF file, and the files of
sentence-transformers.

None of them is trusted.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.pooling.module_files import (
    DenseFile,
    File,
    LayerNormFile,
    LogitScoreFile,
    ModelFile,
    NormalizeFile,
    PoolingFile,
    TransformerFile,
    read_file,
    read_modules,
)
from nanovllm.loading.files import is_gguf, read_json
from nanovllm.loading.hub import Checkpoint
from nanovllm.options.validation import check_choice, shown

_POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""By sentence-transformers' names."""
_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}
_ACTIVATIONS = ("sigmoid", "identity")
_CUTS = {"truncation", "max_length", "padding", "return_tensors", "restore_suffix"}
"""Options with a chat template's that are the tokenizer's."""
_QWEN3_RERANKER = "qwen3-reranker"
_FILE = "config_sentence_transformers.json"


@dataclasses.dataclass(frozen=True)
class PoolingSettings:
    """How a checkpoint makes vectors of texts, and scores of pairs of texts."""

    pooling: str = "last"
    layers: tuple[tuple[Path, File], ...] = ()
    """What follows pooling: where its weights are, and what it is."""
    normalize: bool = True
    dimensions: int | None = None
    """How many numbers to keep of a vector that is normalised already; None: all."""
    similarity: str = "cosine"
    """How two vectors are compared."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By name: what is written before a text."""
    default_prompt_name: str | None = None
    max_tokens: int | None = None
    """Where texts are cut; None: they are not."""
    keeps_end: bool = False
    """Whether the end of a text is kept there, not its beginning."""
    lowers_case: bool = False
    template: Mapping[str, Any] | None = None
    """The options of the chat template by which texts become prompts; None: they are prompts."""
    asks: bool = False
    """Whether a pair of texts is put into Qwen3-Reranker's question, if there is no template."""
    answers: tuple[str | int, ...] = ()
    """Of a reranker that generates: the tokens, or their texts, with which it says that a document
    does not meet a query, and that it does; or the latter alone."""
    activation: str | None = None
    """What makes a score of a logit, "sigmoid" or "identity". None: scores are the similarity of
    vectors."""


def read_settings(checkpoint: Checkpoint, model: str, pooling: str = "last") -> PoolingSettings:
    """Return what the checkpoint's files say; the defaults where they say nothing.

    Args:
        model: the model's name, or its directory.
        pooling: the default.

    Raises:
        CheckpointError: a file is invalid.
        UnsupportedModelError: a file asks for what is not implemented.
    """
    config = checkpoint.config
    is_qwen3 = _QWEN3_RERANKER in Path(model).name.lower()
    activation = _activation(config)
    answers = _named_answers(config, is_qwen3 and activation is None)
    pooling = _GGUF_POOLINGS.get(config.get("pooling_type", 0), pooling)
    settings = PoolingSettings(
        pooling,
        asks=is_qwen3 or bool(answers),
        answers=answers,
        activation="sigmoid" if answers else activation,
    )
    return settings if is_gguf(checkpoint.path) else _with_files(_home(checkpoint.path), settings)


def _home(path: Path) -> Path:
    """Return the directory that has the modules of the network in `path`: it or, where the network
    is in a folder of its own, its parent.
    """
    is_folder = path.name.startswith("0_") and not (path / "modules.json").exists()
    return path.parent if is_folder else path


def _with_files(path: Path, settings: PoolingSettings) -> PoolingSettings:
    """Return `settings` with what the files of sentence-transformers say."""
    model = read_file(path, [_FILE], ModelFile)
    prompts = {name: text or "" for name, text in (model.prompts or {}).items()}
    if (default := model.default_prompt_name) is not None and default not in prompts:
        raise CheckpointError(
            f"{_FILE}: default_prompt_name {shown(default)} is none of its "
            f"prompts ({', '.join(map(shown, prompts)) or 'there are none'})"
        )
    changes: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity": model.similarity_fn_name or "cosine",
        "dimensions": model.truncate_dim,
    }
    layers: list[tuple[Path, File]] = []
    modules = read_modules(path)
    for folder, module in modules:
        match module:
            case TransformerFile():
                changes |= _of_transformer(folder, module)
            case PoolingFile():
                _check_prompts(module, prompts)
                changes["pooling"] = _POOLINGS[module.pooling_mode]
            case LogitScoreFile(false_token_id=no, true_token_id=yes):
                changes["answers"] = (yes,) if no is None else (no, yes)
                changes["activation"] = "sigmoid"
            case NormalizeFile() | DenseFile() | LayerNormFile():
                layers.append((folder, module))
    if modules:
        changes["normalize"] = bool(layers) and type(layers[-1][1]) is NormalizeFile
        changes["layers"] = tuple(layers[:-1] if changes["normalize"] else layers)
    settings = dataclasses.replace(settings, **changes)
    if settings.activation and model.activation_fn:
        name = _activation_name(f"{_FILE}: activation_fn", model.activation_fn)
        settings = dataclasses.replace(settings, activation=name)
    return settings


def _of_transformer(folder: Path, module: TransformerFile) -> dict[str, Any]:
    tokenizer = read_json(folder / "tokenizer_config.json")
    stored = tokenizer.get("model_max_length")
    side = tokenizer.get("truncation_side") or "right"
    sides = ("right",) if "message" in module.modality_config else ("right", "left")
    check_choice(UnsupportedModelError, "tokenizer_config.json: truncation_side", side, sides)
    # sentence-transformers 6 has no other place for its max_seq_length.
    found: dict[str, Any] = {
        "max_tokens": module.max_seq_length or (stored if type(stored) is int else None),
        "keeps_end": side == "left",
        "lowers_case": bool(module.do_lower_case),
    }
    if "message" in module.modality_config:
        options = module.processing_kwargs.get("chat_template", {})
        if cuts := _CUTS & options.keys():
            raise UnsupportedModelError(
                f"sentence_bert_config.json: processing_kwargs: {min(cuts)} is not supported"
            )
        found["template"] = options
    return found


def _check_prompts(module: PoolingFile, prompts: Mapping[str, str]) -> None:
    if not module.include_prompt and module.pooling_mode != "lasttoken" and any(prompts.values()):
        raise UnsupportedModelError(
            "config.json of Pooling: include_prompt false is not supported (only true): pooling "
            "would leave out the prompt's tokens"
        )


def _named_answers(config: dict[str, Any], is_reranker: bool) -> tuple[str, ...]:
    """Return the answers of a reranker by vLLM's field of config.json, or by the model's name."""
    given = config.get("classifier_from_token")
    if given is None:
        return ("no", "yes") if is_reranker else ()
    if not (isinstance(given, list) and len(given) == 2 and {*map(type, given)} == {str}):
        raise CheckpointError(
            "config.json: classifier_from_token must be a list of two strings, such as "
            f'["no", "yes"], is {shown(given)}'
        )
    return tuple(given)


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
            return _activation_name(f"config.json: {key}", found)
    return "sigmoid"


def _activation_name(name: str, value: Any) -> str:
    last = str(value).rpartition(".")[2].lower()
    return check_choice(UnsupportedModelError, name, last, _ACTIVATIONS)
