"""Finds the files of a checkpoint: a local directory, a GGUF file, or a hub id.

Nothing in a checkpoint is trusted: every file is checked before it is opened. Reads the JSON files
and no weights. Imports no torch.
"""

import dataclasses
import logging
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm import demo_model
from nanovllm.errors import CheckpointError
from nanovllm.loading.download import (
    download,
    hub_files,
    plain_name,
    remove_damaged,
    way_online,
)
from nanovllm.loading.files import check_file, is_gguf, is_mmproj, local_path, read_json
from nanovllm.options.config import Config
from nanovllm.options.model_names import is_path, tag_of
from nanovllm.options.validation import check_int, listed, shown

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model"),
    "tekken.json",
)
_CONFIG_PATTERNS = ["*.json", "*.jinja", "tokenizer.model", "tiktoken.model"]
_OPENED_PATTERNS = [
    "*config.json",
    "*token*.json",
    "tiktoken.model",
    "*.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]
"""Files of a directory that may be opened to read its settings and its tokenizer."""
MAX_FILE_BYTES = 64 * 2**20
"""Limit of each of them. The largest known are tokenizer.json files of 33 MB."""
_MAX_LISTED = 5
"""Files that one error names."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this machine, and its parsed JSON files ({} if absent).

    A GGUF file takes the place of the directory, of config.json and of the tokenizer.
    """

    path: Path
    """The directory or the GGUF file."""
    config: dict[str, Any]
    generation_config: dict[str, Any]
    """Of a GGUF file what it recommends for sampling, in the same names."""
    tokenizer_path: Path | None = None
    """Directory or GGUF file of the tokenizer; None if there is none, or none is wanted."""
    mmproj: Path | None = None
    """The file that reads pictures for a GGUF file; None if there is none, or none is wanted."""

    @cached_property
    def processor(self) -> dict[str, Any]:
        """What is said of resizing pictures; {} if nothing is."""
        found = read_json(self.path / "preprocessor_config.json")
        return found or read_json(self.path / "processor_config.json").get("image_processor") or {}

    def __post_init__(self) -> None:
        self.eos_token_ids  # noqa: B018 - raises for invalid ids

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All end-of-sequence ids: of generation_config.json if it has any, or of config.json.

        Raises:
            CheckpointError: an id is not a token of the vocabulary.
        """
        vocab_size = self.config.get("vocab_size")  # may be invalid: ModelConfig checks it
        last = vocab_size - 1 if type(vocab_size) is int and vocab_size > 0 else None
        found = []
        files = {"generation_config.json": self.generation_config, "config.json": self.config}
        for file, settings in files.items():  # also those that do not count
            ids = settings.get("eos_token_id")
            if ids is not None:
                name = f"{file}: eos_token_id"
                ids = ids if isinstance(ids, list) else [ids]
                found.append(frozenset(check_int(CheckpointError, name, i, 0, last) for i in ids))
        return found[0] if found else frozenset()


def has_labels(config: dict[str, Any]) -> bool:
    """Whether a model's logits are those of labels. vLLM's classifier_from_token asks for those of
    tokens instead.
    """
    names = str(config.get("architectures"))
    return "ForSequenceClassification" in names and config.get("classifier_from_token") is None


def configured_checkpoint(config: Config) -> Checkpoint:
    """Return the checkpoint of `config.model`, with what `config` replaces in it.

    Raises:
        CheckpointError: as for `open_checkpoint`, also for the tokenizer and generation_config.
    """
    checkpoint = open_checkpoint(config.model, config.revision, config.download_dir)
    generation_config = checkpoint.generation_config
    tokenizer_path = checkpoint.tokenizer_path
    if config.generation_config not in ("auto", "vllm"):
        directory = local_path(config.generation_config)
        if not check_file(directory, "generation_config.json", MAX_FILE_BYTES):
            raise CheckpointError(f"{directory} has no generation_config.json")
        generation_config = read_json(directory / "generation_config.json")
    if config.skip_tokenizer_init:
        tokenizer_path = None
    elif config.tokenizer is not None:
        name = plain_name(config.tokenizer, config.download_dir)
        path = _find_directory(name, None, config.download_dir, "tokenizer")
        if (tokenizer_path := _tokenizer_path(path)) is None:
            raise CheckpointError(f"tokenizer {config.tokenizer!r}: {path} has no tokenizer.json")
    mmproj = None
    if config.mmproj is not None or is_gguf(checkpoint.path):
        from nanovllm.loading.mmproj_files import find_mmproj

        kind = checkpoint.config.get("model_type")
        mmproj = find_mmproj(config, checkpoint.path, kind, _find_gguf_file)
    return Checkpoint(
        checkpoint.path,
        {**checkpoint.config, **(config.hf_overrides or {})},
        generation_config,
        tokenizer_path,
        mmproj,
    )


def draft_checkpoint(config: Config) -> Checkpoint | None:
    """Return the checkpoint of the draft network that `config` names; None if it names none.

    Raises:
        CheckpointError: as for `open_checkpoint`.
    """
    spec = config.speculation
    if spec is None or spec.model is None:
        return None
    checkpoint = open_checkpoint(spec.model, None, config.download_dir)
    if config.skip_tokenizer_init:
        return dataclasses.replace(checkpoint, tokenizer_path=None)
    return checkpoint


def open_checkpoint(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Checkpoint:
    """Return the checkpoint of `model`; download its JSON and tokenizer files if needed.

    Args:
        model: a local directory or a hub id, a GGUF file, or a file in a hub repository, such as
            "owner/repo/model.gguf", also by the end of its name: "owner/repo:Q4_K_M"; or an address
            of the hub. What is local goes first.
        download_dir: where downloads go; None is huggingface_hub's cache.

    A GGUF file that is damaged in the cache is fetched anew. Other files of the cache may have been
    edited on purpose.

    Raises:
        CheckpointError: there is no such directory or hub id, the hub cannot be reached, there is
            no config.json, or a file is invalid or must not be opened.
    """
    model = plain_name(model, download_dir)
    path = _find(model, revision, download_dir)
    try:
        return _read(path)
    except CheckpointError as error:
        if not is_gguf(path) or local_path(model).exists() or not remove_damaged([path]):
            raise
        logger.warning("%s; it is not what the hub has, so it is fetched again", error)
    return _read(_find(model, revision, download_dir))


def _find(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the directory or the GGUF file of `model`; download what is read first of it."""
    path = _find_gguf_file(model, revision, download_dir)
    if path is None:
        path = _find_directory(model, revision, download_dir, "model")
        if not (path / "config.json").is_file():
            path = _only_gguf(path, model, revision, download_dir)
    return path


def _read(path: Path) -> Checkpoint:
    if is_gguf(path):
        from nanovllm.loading.gguf import read_gguf

        found = read_gguf(path)
        if "vision_config" in found.config:
            raise CheckpointError(
                f"{path} is an mmproj file, which only reads pictures for a model: name the file "
                "of the model, and this one as mmproj"
            )
        sampling = {**demo_model.recommended(path), **found.sampling}
        return Checkpoint(path, found.config, sampling, path if found.tokenizer else None)
    return Checkpoint(
        path,
        _read_config(path),
        read_json(path / "generation_config.json"),
        _tokenizer_path(path),
    )


def _network_folder(path: Path) -> Path:
    """Return the folder of a directory that has the network: it, or one that sentence-transformers
    made in its first version.
    """
    name = "0_Transformer"
    has_own = (path / "config.json").exists() or not check_file(path, f"{name}/config.json")
    return path if has_own else path / name


def _read_config(path: Path) -> dict[str, Any]:
    """Return config.json. quantization_config lies in another file in old uploads of ModelOpt, does
    not say that it is ModelOpt's in others, and has another name in those of MLX.
    """
    config = read_json(path / "config.json")
    if isinstance(config.get("quantization"), dict):
        config.setdefault("quantization_config", config["quantization"])
    if config.get("quantization_config") is None and (path / "hf_quant_config.json").exists():
        found = read_json(path / "hf_quant_config.json")
        config["quantization_config"] = {"quant_method": "modelopt", **found}
    stored: Any = config.get("quantization_config")
    match stored:
        case {"quant_algo": _} | {"quantization": {"quant_algo": _}}:  # as ModelOpt alone writes
            stored["quant_method"] = stored.get("quant_method") or "modelopt"
    return config


def weight_files(
    checkpoint: Checkpoint,
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
) -> list[Path]:
    """Return the weight files of `checkpoint`; download them if `model` is a hub id.

    Raises:
        CheckpointError: there are none, the index names missing files, or a file is outside the
            directory or not a regular one.
    """
    path = checkpoint.path
    if is_gguf(path):
        return [path]
    model = plain_name(model, download_dir)
    from_hub = not local_path(model).is_dir()
    if from_hub:
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        path = _network_folder(download(model, revision, patterns, download_dir))
    files = safetensors_files(path)
    if not files:
        others = sorted(
            f.name for f in path.iterdir() if f.suffix in {".bin", ".pt", ".pth", ".gguf"}
        )
        if from_hub and not others:
            raise CheckpointError(
                f"no .safetensors weights of {model!r} in the local cache, and none came from the "
                f"hub (offline, or it has none): {way_online()}, or give a local directory"
            )
        if gguf := [name for name in others if name.endswith(".gguf")]:
            raise CheckpointError(
                f"{path} has no .safetensors weights next to config.json; give the path of "
                f"{shown(gguf[0])} itself"
            )
        found = f" (found {', '.join(others)}, which is not read)" if others else ""
        raise CheckpointError(
            f"{path} has no .safetensors weights{found}; convert the checkpoint to safetensors, "
            'or use load_format="dummy" for random weights'
        )
    return files


def safetensors_files(path: Path) -> list[Path]:
    """Return the weight files of a directory: those that its index names, or all.

    Raises:
        CheckpointError: the index names missing files, or a file is outside the directory or not a
            regular one.
    """
    if named := _indexed_files(path / "model.safetensors.index.json"):
        return named
    if check_file(path, "model.safetensors"):
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if missing := [file.name for file in files if not check_file(path, file.name)]:
        raise CheckpointError(f"{path}: {shown(missing[0])} is a link to a missing file")
    return files


def _indexed_files(index: Path) -> list[Path]:
    """Return the files that `index` names; none if there is no such file."""
    path = index.parent
    if not check_file(path, index.name, MAX_FILE_BYTES):
        return []
    weight_map = read_json(index).get("weight_map")
    if not (
        isinstance(weight_map, dict)
        and weight_map
        and all(isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError(f"{index} has no weight_map of file names")
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not check_file(path, name)]:
        found = listed([name if len(name) < 100 else shown(name) for name in missing], _MAX_LISTED)
        raise CheckpointError(f"{index} names files that are missing: {found}")
    return [path / name for name in names]


def _find_gguf_file(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the GGUF file that `model` names, here or on the hub; None if it names none."""
    local = local_path(model)
    if (tagged := tag_of(model)) and not local.exists():
        model = _tagged_file(*tagged, revision, download_dir)
        local = local_path(model)
    if not is_gguf(local) or local.is_dir():
        return None
    if local.exists():
        if not local.is_file():
            raise CheckpointError(f"{model!r} is not a regular file")
        return local.absolute()
    if is_path(model) or model.count("/") < 2:
        raise CheckpointError(f"GGUF file {model!r} does not exist")
    owner, repo, name = model.split("/", 2)
    repo = f"{owner}/{repo}"
    path = download(repo, revision, [name], download_dir)
    if not (path / name).exists():  # letter case does not count here either
        here = [file.relative_to(path).as_posix() for file in path.rglob("*.gguf")]
        same = [each for each in here if each.casefold() == name.casefold()]
        name = same[0] if len(same) == 1 else name
    if not check_file(path, name):
        raise CheckpointError(f"hub model {repo!r} has no file {name!r}, or it is not cached here")
    return path / name


def _tagged_file(repo: str, tag: str, revision: str | None, download_dir: str | None) -> str:
    """Return the one GGUF file of a hub repository whose name ends in `tag`, as REPO/FILE."""
    ending = re.compile(rf"(^|[-._/]){re.escape(tag)}\.gguf$", re.IGNORECASE)

    def tagged(names: Iterable[str]) -> list[str]:
        return [name for name in _models(names) if ending.search(name)]

    path = _find_directory(repo, revision, download_dir, "model")
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*.gguf"))
    if not (found := tagged(names)):
        names = [name for name in hub_files(repo, revision) if is_gguf(Path(name))] or names
        found = tagged(names)
    if len(found) == 1:
        return f"{repo}/{found[0]}"
    many = f"{len(found)} GGUF files" if found else "no GGUF file"
    those = listed(found or names, _MAX_LISTED) or "no GGUF files"
    raise CheckpointError(
        f"hub model {repo!r} has {many} for the tag {tag!r}; name a file, as "
        f"{repo}/FILE.gguf: it has {those}"
    )


def _models(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files without those that only see pictures for another one."""
    return [name for name in names if not is_mmproj(name)]


def _only_gguf(path: Path, model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the one GGUF file of directory `path`; download it if `model` is a hub id."""
    names = sorted(file.name for file in path.glob("*.gguf"))
    from_hub = not local_path(model).is_dir()
    if from_hub:
        names = [name for name in hub_files(model, revision) if is_gguf(Path(name))] or names
    if not (names := _models(names) or names):
        has = ""
        if (path / "adapter_config.json").is_file():
            has = ". It has an adapter: name its model, and the adapter in lora_request"
        raise CheckpointError(
            f"{path} is not a model directory: it has no config.json and no GGUF file{has}"
        )
    if len(names) > 1:
        raise CheckpointError(
            f"{model} holds {len(names)} GGUF files; name one of them, such as "
            f"{model}/{names[0]}: {listed(names, _MAX_LISTED)}"
        )
    if from_hub and not (path / names[0]).exists():
        path = download(model, revision, names, download_dir)
    if not check_file(path, names[0]):
        raise CheckpointError(f"{path}: {shown(names[0])} is a link to a missing file")
    return path / names[0]


def _find_directory(model: str, revision: str | None, download_dir: str | None, what: str) -> Path:
    """Return the directory of `model`, or of its download without weights; check its files."""
    local = local_path(model)
    if local.is_dir():
        path = local.resolve()
    elif local.exists():
        raise CheckpointError(
            f"{what} {model!r} is a file; give the directory that holds "
            f"{'config.json' if what == 'model' else 'tokenizer.json'}"
        )
    elif is_path(model) or model.count("/") > 1:
        raise CheckpointError(f"{what} directory {model!r} does not exist")
    else:
        path = download(model, revision, _CONFIG_PATTERNS, download_dir)
    path = _network_folder(path)
    for pattern in _OPENED_PATTERNS:
        for file in path.glob(pattern):
            check_file(path, str(file.relative_to(path)), MAX_FILE_BYTES)
    return path


def _tokenizer_path(path: Path) -> Path | None:
    """Return `path` if it has tokenizer files, otherwise None."""
    return path if any((path / name).is_file() for name in TOKENIZER_FILES) else None
