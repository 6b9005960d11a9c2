"""Fields of a config.json, checked one by one."""

from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import check_bool, check_float, check_int, shown

MAX_SIZE = 2**24
"""Far above every known model, and low enough that no product of sizes overflows."""


_BY_TYPE = {
    ("BailingMoeV3ForCausalLM", "bailing_hybrid"): "BailingHybridForCausalLM",
    ("Mistral3ForConditionalGeneration", "mistral4"): "Mistral4ForCausalLM",
}
"""The architectures of text models, by the one that config.json names and the text model's own
model_type: of those that do not follow from the first alone."""


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model: those of a nested text_config, if there is one.

    Of the outer fields, only those that say how the whole checkpoint is stored are added.
    """
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, dict):
        raise CheckpointError(f"config.json: text_config must be an object, is {shown(nested)}")
    outer = ("architectures", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    return {**nested, **{key: config[key] for key in outer if config.get(key) is not None}}


def architecture_of(config: dict[str, Any]) -> str:
    """Return the architecture that a parsed config.json names, or that of its text model.

    Raises:
        CheckpointError: it does not name one.
    """
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise CheckpointError(f"config.json must name one architecture, has {shown(names)}")
    nested = config.get("text_config")
    kind = (nested if isinstance(nested, dict) else config).get("model_type")
    return _BY_TYPE.get((names[0], str(kind)), names[0])


def check_one_label(config: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if a model has several labels, and no one score."""
    labels = config.get("id2label")
    number = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if number != 1:
        raise UnsupportedModelError(
            f"config.json: {shown(number)} labels (id2label, num_labels) are not supported (only "
            "one label, which is the score of a cross-encoder): a classifier is not a reranker, "
            "as in vLLM's /score and sentence-transformers' rank"
        )


def config_size(
    config: dict[str, Any],
    key: str,
    default: int | None = None,
    high: int = MAX_SIZE,
    low: int = 1,
) -> int:
    """Return a size in a config.json, from `low` to `high`; `default` for null."""
    value = config.get(key)
    value = default if value is None else value
    return check_int(CheckpointError, f"config.json: {key}", value, low, high)


def config_number(
    config: dict[str, Any], key: str, default: float, low: float, high: float
) -> float:
    """Return a number from `low` to `high` in a config.json; `default` if it is absent."""
    return check_float(CheckpointError, f"config.json: {key}", config.get(key, default), low, high)


def config_bool(config: dict[str, Any], key: str, default: bool) -> bool:
    """Return a field that is true or false in a config.json; `default` if it is absent."""
    return check_bool(CheckpointError, f"config.json: {key}", config.get(key, default))
