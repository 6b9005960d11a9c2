"""Finds the files of a checkpoint: a local directory, or a hub id through huggingface_hub.

Reads the JSON files and no weights. Imports no torch.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.errors import CheckpointError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_CONFIG_PATTERNS = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this machine: its directory and its parsed JSON files ({} if absent)."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_path: Path | None = None
    """Directory of the tokenizer; None if there is none, or none is wanted."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All end-of-sequence ids: of generation_config.json if it has any, else of config.json."""
        ids = self.generation_config.get("eos_token_id")
        if ids is None:
            ids = self.config.get("eos_token_id")
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to load."""
        return self.tokenizer_path is not None


def configured_checkpoint(config: Config) -> Checkpoint:
    """Return the checkpoint of `config.model`, with what `config` replaces in it.

    Raises:
        CheckpointError: as for `open_checkpoint`, also for the tokenizer and generation_config.
    """
    checkpoint = open_checkpoint(config.model, config.revision, config.download_dir)
    generation_config, tokenizer_path = checkpoint.generation_config, checkpoint.tokenizer_path
    if config.generation_config not in ("auto", "vllm"):
        file = _local_path(config.generation_config) / "generation_config.json"
        generation_config = _read_json(file)
    if config.skip_tokenizer_init:
        tokenizer_path = None
    elif config.tokenizer is not None:
        path = _find_directory(config.tokenizer, None, config.download_dir, "tokenizer")
        if (tokenizer_path := _tokenizer_path(path)) is None:
            raise CheckpointError(f"tokenizer {config.tokenizer!r}: {path} has no tokenizer.json")
    return Checkpoint(
        checkpoint.path,
        {**checkpoint.config, **(config.hf_overrides or {})},
        generation_config,
        tokenizer_path,
    )


def open_checkpoint(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Checkpoint:
    """Return the checkpoint of `model`; download its JSON and tokenizer files if needed.

    Args:
        model: a local directory or a hub id. A directory goes first.
        download_dir: where downloads go; None is huggingface_hub's cache.

    Raises:
        CheckpointError: there is no such directory or hub id, the hub cannot be reached, or there
            is no config.json.
    """
    path = _find_directory(model, revision, download_dir, "model")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} is not a model directory: it has no config.json")
    generation_config = path / "generation_config.json"
    return Checkpoint(
        path,
        _read_json(path / "config.json"),
        _read_json(generation_config) if generation_config.is_file() else {},
        _tokenizer_path(path),
    )


def weight_files(
    checkpoint: Checkpoint,
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
) -> list[Path]:
    """Return the safetensors files of `checkpoint`; download them if `model` is a hub id.

    Raises:
        CheckpointError: there are none, or the index names missing files.
    """
    path = checkpoint.path
    from_hub = not _local_path(model).is_dir()
    if from_hub:
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        path = _download(model, revision, patterns, download_dir)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not (
            isinstance(weight_map, dict)
            and weight_map
            and all(isinstance(name, str) for name in weight_map.values())
        ):
            raise CheckpointError(f"{index} has no weight_map of file names")
        files = [path / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(f"{index} names files that are missing: {', '.join(missing)}")
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = sorted(
            f.name for f in path.iterdir() if f.suffix in {".bin", ".pt", ".pth", ".gguf"}
        )
        if from_hub and not others:
            raise CheckpointError(
                f"no .safetensors weights of {model!r} in the local cache, and none came from the "
                "hub (offline, or it has none): connect once, unset HF_HUB_OFFLINE, or give a "
                "local directory"
            )
        found = f" (found {', '.join(others)}, which is not read)" if others else ""
        raise CheckpointError(
            f"{path} has no .safetensors weights{found}; convert the checkpoint to safetensors, "
            'or use load_format="dummy" for random weights'
        )
    return files


def _find_directory(model: str, revision: str | None, download_dir: str | None, what: str) -> Path:
    """Return the directory of `model`, or of its download without weights.

    Args:
        what: "model" or "tokenizer", for messages.
    """
    local = _local_path(model)
    if local.is_dir():
        return local.resolve()
    if local.exists():
        raise CheckpointError(
            f"{what} {model!r} is a file; give the directory that holds "
            f"{'config.json' if what == 'model' else 'tokenizer.json'}"
        )
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{what} directory {model!r} does not exist")
    return _download(model, revision, _CONFIG_PATTERNS, download_dir)


def _tokenizer_path(path: Path) -> Path | None:
    """Return `path` if it has tokenizer files, else None."""
    return path if any((path / name).is_file() for name in _TOKENIZER_FILES) else None


def _local_path(model: str) -> Path:
    """Return `model` as a path, which may not exist."""
    try:
        local = Path(model).expanduser()
        local.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, an unknown user
        raise CheckpointError(f"model {model!r} cannot be a path or a hub id: {error}") from error
    return local


def _download(
    model: str, revision: str | None, patterns: list[str], download_dir: str | None
) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    fetch = functools.partial(
        huggingface_hub.snapshot_download,
        model,
        revision=revision,
        cache_dir=None if download_dir is None else str(_local_path(download_dir)),
        allow_patterns=patterns,
    )
    try:
        try:
            return Path(fetch())
        except OfflineModeIsEnabled:  # huggingface_hub 1.33 lists a commit's files online
            return Path(fetch(local_files_only=True))
    except HFValidationError as error:
        raise CheckpointError(
            f"model {model!r} is neither a directory here nor a valid hub id: {error}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"hub model {model!r} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {model!r} is no directory here and no model on the hub "
            "(or a private one: log in)"
        ) from error
    except Exception as error:  # offline, a full disk, ...: huggingface_hub raises many types
        raise CheckpointError(
            f"cannot get {model!r} from the hub: {error} - it is not (wholly) in the local cache; "
            "connect once, unset HF_HUB_OFFLINE, or give a local directory"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
