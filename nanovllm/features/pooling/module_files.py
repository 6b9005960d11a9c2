"""The files of a sentence-transformers directory: what each may say.

None of them is trusted. A field that would change a number is honoured, or refused by name.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nanovllm.errors import UnsupportedModelError
from nanovllm.loading.files import MAX_JSON_BYTES, check_file, parse_object, read_json
from nanovllm.options.validation import shown

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
            raise UnsupportedModelError(
                f"modules.json: the module {shown(module.type)} is not supported (only "
                f"{', '.join(_KINDS)})"
            )
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
