"""What a checkpoint says about its vectors and scores: config.json, a GGUF file, and the files of
sentence-transformers.

None of them is trusted. A field that would change a number is honoured, or refused by name.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.files import MAX_JSON_BYTES, check_file, is_gguf, parse_object, read_json
from nanovllm.loading.hub import Checkpoint
from nanovllm.options.validation import check_choice, shown, unsupported

_OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Poolings by the fields that older files set to true."""
_TRANSFORMER_FILES = [
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
"""The names that the file of a Transformer has had; the first that says something counts."""

_Size = Annotated[int, Field(ge=1, le=2**24)]
_SAME_NUMBERS = Literal[
    "trust_remote_code", "attn_implementation", "dtype", "torch_dtype", "device_map", "padding_side"
]
_Options = dict[_SAME_NUMBERS, Any] | None
"""Options of transformers that change no number here, where `Config` says the dtype."""
_OfVector = Literal["sentence_embedding"] | None
_Activation = Annotated[
    str, Field(pattern=r"^torch\.nn\.([a-z.]+\.)?(Identity|Tanh|ReLU|GELU|Sigmoid|SiLU)$")
]


class File(BaseModel):
    """A file; a field that is not here is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelFile(File):
    """config_sentence_transformers.json, of which sentence-transformers reads these fields."""

    model_config = ConfigDict(extra="ignore")

    model_type: Literal["SentenceTransformer", "CrossEncoder"] | None = None
    prompts: dict[str, str | None] | None = Field(None, max_length=1024)
    default_prompt_name: str | None = None
    similarity_fn_name: Literal["cosine", "dot", "euclidean", "manhattan"] | None = None
    truncate_dim: _Size | None = None
    activation_fn: str | None = None
    keep_in_fp32_modules: Annotated[list[Any] | None, Field(max_length=0)] = None


class Listed(File):
    """An entry of modules.json."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(pattern=r"^sentence_transformers\.")]
    path: str


class Modality(File):
    """How a Transformer reads texts, or messages."""

    method: Literal["forward"] = "forward"
    method_output_name: Literal["last_hidden_state", "logits"] | None = None
    format: Literal["flat"] = "flat"


class TransformerFile(File):
    """The network and its tokenizer."""

    transformer_task: (
        Literal["feature-extraction", "sequence-classification", "text-generation"] | None
    ) = None
    module_output_name: Literal["token_embeddings", "scores", "causal_logits"] | None = None
    modality_config: dict[str, Modality] = {}
    processing_kwargs: dict[Literal["chat_template"], dict[str, Any]] = {}
    max_seq_length: _Size | None = None
    do_lower_case: bool | None = None
    unpad_inputs: bool | None = None
    query_length: None = None
    document_length: None = None
    query_expansion: None = None
    tokenizer_name_or_path: None = None
    model_args: _Options = None
    tokenizer_args: _Options = None
    config_args: _Options = None
    model_kwargs: _Options = None
    processor_kwargs: _Options = None
    config_kwargs: _Options = None


class PoolingFile(File):
    """One vector of those of a text's tokens."""

    pooling_mode: Literal["lasttoken", "mean", "cls"]
    include_prompt: bool = True
    embedding_dimension: int | None = None
    word_embedding_dimension: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_old_fields(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = dict(given)
        old = [mode for field, mode in _OLD_POOLINGS.items() if given.pop(field, False)]
        modes = given.get("pooling_mode") or old or "mean"
        is_one = isinstance(modes, list) and len(modes) == 1
        return {**given, "pooling_mode": modes[0] if is_one else modes}


class NormalizeFile(File):
    """Vectors are divided by their lengths."""

    module_input_name: _OfVector = None
    module_output_name: _OfVector = None


class DropoutFile(File):
    """Nothing: it is for training."""

    dropout: float = 0.0


class LayerNormFile(File):
    """A norm of vectors."""

    dimension: _Size


class DenseFile(NormalizeFile):
    """A product with vectors."""

    in_features: _Size
    out_features: _Size
    bias: bool = True
    activation_function: _Activation = "torch.nn.Tanh"
    use_residual: Literal[False] = False


class LogitScoreFile(File):
    """A score from the logits of one token or two."""

    true_token_id: Annotated[int, Field(ge=0)]
    false_token_id: Annotated[int, Field(ge=0)] | None = None
    module_input_name: Literal["causal_logits"] | None = None


_KINDS: dict[str, type[File]] = {
    "Transformer": TransformerFile,
    "Pooling": PoolingFile,
    "LogitScore": LogitScoreFile,
    "Normalize": NormalizeFile,
    "Dropout": DropoutFile,
    "LayerNorm": LayerNormFile,
    "Dense": DenseFile,
}
Kind = TypeVar("Kind", bound=File)


def read_file(path: Path, names: list[str], kind: type[Kind]) -> Kind:
    """Return what the first file of a directory says that says something.

    Raises:
        UnsupportedModelError: it says what is not implemented, or is invalid.
    """
    found: Mapping[str, Any] = {}
    for name in names:
        found = found or (read_json(path / name) if check_file(path, name) else {})
    return _validated(names[0], found, kind)


def read_modules(path: Path) -> list[tuple[Path, File]]:
    """Return the folders of the modules in a directory, and what the file of each says; [] without
    modules.json.

    Raises:
        CheckpointError: a file is invalid, or asks for what is not implemented.
    """
    if not check_file(path, "modules.json", MAX_JSON_BYTES):
        return []
    text = (path / "modules.json").read_bytes()
    listed = parse_object(b'{"modules": ' + text + b"}", f"{path}/modules.json")["modules"]
    if not isinstance(listed, list) or not 0 < len(listed) <= 32:
        raise UnsupportedModelError(
            f"{path}/modules.json must hold a list of 1 to 32 modules, is {shown(listed)}"
        )
    found = []
    kinds = []
    for each in listed:
        module = _validated("modules.json", each, Listed)
        folder = PurePosixPath(module.path)
        if ".." in folder.parts or folder.is_absolute():
            raise UnsupportedModelError(
                f"modules.json: path {shown(module.path)} must be a folder of the checkpoint"
            )
        kind = module.type.rpartition(".")[2]
        if kind not in _KINDS:
            raise unsupported("modules.json: the module", module.type, ", ".join(_KINDS))
        kinds.append(kind)
        files = _TRANSFORMER_FILES if kind == "Transformer" else ["config.json"]
        names = [str(folder / name) for name in files]
        found.append((path / folder, read_file(path, names, _KINDS[kind])))
    head = [kind for kind in kinds if kind in ("Pooling", "LogitScore")]
    if kinds[0] != "Transformer" or kinds[1:2] != head or kinds.count("Transformer") > 1:
        raise UnsupportedModelError(
            f"modules.json: the modules {', '.join(kinds)} are not supported (only a Transformer, "
            "then Pooling or LogitScore, if any, and then the others)"
        )
    return found


def _validated(name: str, given: Any, kind: type[Kind]) -> Kind:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"][:1].lower() + first["msg"][1:]
        if first["type"] == "extra_forbidden":
            message = "this field is not supported"
        raise UnsupportedModelError(
            f"{name}: {field}: {message}, got {shown(first['input'])}"
        ) from None


_POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""By sentence-transformers' names."""
_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}
_ACTIVATIONS = ("sigmoid", "identity")
_CUTS = {"truncation", "max_length", "padding", "return_tensors", "restore_suffix"}
"""Options with a chat template's that are the tokenizer's."""
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
    is_qwen3 = "qwen3-reranker" in Path(model).name.lower()
    activation = _activation(config)
    answers = _named_answers(config, is_qwen3 and activation is None)
    pooling = _GGUF_POOLINGS.get(config.get("pooling_type", 0), pooling)
    settings = PoolingSettings(
        pooling,
        asks=is_qwen3 or bool(answers),
        answers=answers,
        activation="sigmoid" if answers else activation,
    )
    path = checkpoint.path
    if is_gguf(path):
        return settings
    if path.name.startswith("0_") and not (path / "modules.json").exists():
        path = path.parent  # the network is in a folder of its own
    return _with_files(path, settings)


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
