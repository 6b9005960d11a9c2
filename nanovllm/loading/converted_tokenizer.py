"""A tokenizer made of a GGUF file, or of files without a tokenizer.json.

Importing transformers and making a tokenizer with it takes 0.8 s at each start, so what it made is
kept on disk; reading that takes a few milliseconds.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from nanovllm.errors import CheckpointError
from nanovllm.loading.files import check_file, is_gguf, read_json, refuse_pointer
from nanovllm.loading.gguf import read_gguf
from nanovllm.loading.gguf_tokenizer import convert_gguf_tokenizer
from nanovllm.loading.hub import MAX_FILE_BYTES, OPENED_PATTERNS, Checkpoint
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.loading.tiktoken_file import KIMI_CLASS, TIKTOKEN_MODEL, is_kimi, read_tiktoken
from nanovllm.loading.tokenizer_files import read_chat_templates
from nanovllm.options.validation import shown
from nanovllm.utils import disk_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FORMAT = 4
"""Raise it when the fields that are kept, or how the tokenizer is made, change."""
_PACKAGES = ("transformers", "tokenizers")
_MAX_KEPT = 16
"""Tokenizers kept on disk; the one that was not used for longest goes first."""
_CLASSES = ("LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer")
"""transformers' classes that build all of a tokenizer from older files, and nothing else."""
_VOCABULARIES = ("tokenizer.model", "vocab.json")
_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
"""Packages that read a tokenizer.model, and their modules."""
_REMEDY = (
    "take the tokenizer.json and the tokenizer_config.json of another upload of this model; "
    "tokenizer= names a directory that has them, and skip_tokenizer_init=True takes prompts as "
    "token ids"
)


def converted_tokenizer(checkpoint: Checkpoint) -> TextTokenizer:
    """Return the tokenizer of a GGUF file, or of a directory without tokenizer.json.

    Raises:
        CheckpointError: the files are invalid, or do not say all of a tokenizer.
    """
    path = checkpoint.tokenizer_path
    assert path is not None
    if not is_gguf(path):
        _check_directory(path)
    if (kept := _read_kept(checkpoint)) is not None:
        return kept
    try:
        if is_gguf(path):
            fields = _fields_of(convert_gguf_tokenizer(path, read_gguf(path).tokenizer))
        else:
            settings = read_json(path / "tokenizer_config.json")
            is_tiktoken = (path / TIKTOKEN_MODEL).is_file()
            fields = _fields_of(read_tiktoken(path, settings) if is_tiktoken else _load(path))
            fields["chat_template"] = read_chat_templates(path, settings)
        tokenizer = _from_fields(fields)
        tokenizer.decode(tokenizer.encode("a b"))  # raises for an id that is not a token
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:  # many kinds; a panic of tokenizers is not an Exception
        which = "its metadata" if is_gguf(path) else "one of its files"
        raise CheckpointError(
            f"cannot load the tokenizer in {path}: {which} is invalid: {error!s:.300}"
        ) from error
    _keep(checkpoint, fields)
    return tokenizer


def _load(path: Path) -> "PreTrainedTokenizerBase":
    """Return what the class of tokenizer_config.json makes of the files in directory `path`."""
    from transformers import AutoTokenizer, PretrainedConfig

    # transformers would allocate what config.json asks for: it gets no settings.
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, config=PretrainedConfig(), trust_remote_code=False
    )
    return tokenizer


def _check_directory(path: Path) -> None:
    """Check the files of a tokenizer without tokenizer.json before transformers reads them.

    Raises:
        CheckpointError: a file is not a JSON object or a Git LFS pointer, names a file outside the
            directory, or asks for a class whose constructor may do anything; or the files do not
            say all of a tokenizer.
    """
    for name in ("special_tokens_map.json", "added_tokens.json"):
        read_json(path / name)
    file = path / "tokenizer_config.json"
    settings = read_json(file)
    for key, value in settings.items():
        names = value if isinstance(value, list) else [value]
        if key.endswith(("_file", "_files")):
            for name in names:
                if isinstance(name, str) and not check_file(path, name, MAX_FILE_BYTES):
                    raise CheckpointError(f"{file}: {key} names {shown(name)}, which is missing")
    for name in _opened_files(path, settings):
        with (path / name).open("rb") as opened:
            refuse_pointer(path / name, opened.read(64))
    if lacks := _what_is_missing(path, settings):
        raise CheckpointError(f"{path} has no tokenizer.json, only {lacks}: {_REMEDY}")


def _what_is_missing(path: Path, settings: Mapping[str, Any]) -> str | None:
    """Return which of a tokenizer's files there are, and what they lack; None: they say it all."""
    has = {name: (path / name).is_file() for name in ("tekken.json", *_VOCABULARIES, "merges.txt")}
    if has["tekken.json"]:
        return "tekken.json, which is Mistral's own format"
    if (path / TIKTOKEN_MODEL).is_file():
        if is_kimi(settings):
            return None
        return f"{TIKTOKEN_MODEL}, and the code that comes with it is not {KIMI_CLASS}"
    vocabulary = next((name for name in _VOCABULARIES if has[name]), None)
    if vocabulary is None or (vocabulary == "vocab.json" and not has["merges.txt"]):
        return "parts of a tokenizer, without a vocabulary and its merges"
    asked = settings.get("tokenizer_class")
    if asked is None:
        return f"{vocabulary}: tokenizer_config.json with its tokenizer_class is missing, too"
    if not isinstance(asked, str) or asked.removesuffix("Fast") not in _CLASSES:
        return f"{vocabulary}, and tokenizer_class {shown(asked)} is not {', '.join(_CLASSES)}"
    if vocabulary == "tokenizer.model":
        missing = [name for name, module in _SENTENCEPIECE.items() if not _is_installed(module)]
        if missing:
            return f"tokenizer.model, for which a `pip install {' '.join(missing)}` is missing"
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def _opened_files(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the files in directory `path` that decide its tokenizer, sorted.

    Args:
        settings: tokenizer_config.json.
    """
    other = {
        name
        for key, value in settings.items()
        if key.endswith(("_file", "_files"))
        for name in (value if isinstance(value, list) else [value])
        if isinstance(name, str)
    }
    matching = {str(f.relative_to(path)) for p in OPENED_PATTERNS for f in path.glob(p)}
    return sorted(name for name in matching | other if (path / name).is_file())


def _fields_of(tokenizer: "PreTrainedTokenizerBase | TextTokenizer") -> dict[str, Any]:
    """Return what makes a `TextTokenizer` that does what `tokenizer` does."""
    backend: Any = tokenizer.backend_tokenizer
    return {
        "backend": backend.to_str(),
        "split_special_tokens": bool(backend.encode_special_tokens),
        "special_tokens_map": dict(tokenizer.special_tokens_map),
        "chat_template": tokenizer.chat_template,
    }


def _from_fields(fields: Mapping[str, Any]) -> TextTokenizer:
    backend: Tokenizer = Tokenizer.from_str(fields["backend"])
    backend.encode_special_tokens = fields["split_special_tokens"]
    return TextTokenizer(backend, fields["special_tokens_map"], fields["chat_template"])


def _read_kept(checkpoint: Checkpoint) -> TextTokenizer | None:
    """Return the tokenizer that was kept for the checkpoint's files; None if there is none."""
    directory = disk_cache.cache_directory(warn=False)
    if directory is None:
        return None
    file = directory / _name(checkpoint)
    try:
        content = disk_cache.check_file(file)
        found = _from_fields(json.loads(content))
        os.utime(file)  # it was used now
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged, or made by a library that this one cannot read
        logger.info("making the tokenizer again: %s", error)
        return None
    return found


def _keep(checkpoint: Checkpoint, fields: Mapping[str, Any]) -> None:
    """Keep a tokenizer for the next start, if there is a safe place."""
    directory = disk_cache.cache_directory(warn=False)
    if directory is None:
        return
    with contextlib.suppress(OSError), disk_cache.new_directory(directory) as new:
        file = Path(new, _name(checkpoint))
        file.write_text(json.dumps(fields))
        disk_cache.seal(file)
        disk_cache.store(file, directory)
        used = sorted(directory.glob("tokenizer-*.json"), key=lambda kept: kept.stat().st_mtime)
        for kept in used[:-_MAX_KEPT]:
            kept.unlink(missing_ok=True)


def _name(checkpoint: Checkpoint) -> str:
    """Return the name of the kept file: a hash of all that decides what transformers makes."""
    digest = hashlib.sha256(repr(_FORMAT).encode())
    for part in _decisive(checkpoint):
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"tokenizer-{digest.hexdigest()[:32]}.json"


def _decisive(checkpoint: Checkpoint) -> Iterator[bytes]:
    path = checkpoint.tokenizer_path
    assert path is not None
    yield from (f"{name} {version(name)}".encode() for name in _PACKAGES)
    if is_gguf(path):
        weights = read_gguf(path).weights.values()
        with path.open("rb") as file:
            yield file.read(min(weight.tensor.offset for weight in weights))
        return
    for file_name in _opened_files(path, read_json(path / "tokenizer_config.json")):
        try:
            yield file_name.encode()
            yield (path / file_name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path / file_name}: {error}") from error
