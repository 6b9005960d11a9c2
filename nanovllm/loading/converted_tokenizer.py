"""A tokenizer made of a GGUF file, or of Kimi's tiktoken.model.

Importing transformers and making a tokenizer with it takes 0.8 s at each start, so what it made of
a GGUF file is kept on disk; reading that takes a few milliseconds.
"""

import base64
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from nanovllm.errors import CheckpointError
from nanovllm.loading.files import is_gguf, read_json, refuse_pointer
from nanovllm.loading.gguf import read_gguf
from nanovllm.loading.gguf_tokenizer import convert_gguf_tokenizer
from nanovllm.loading.hub import TOKENIZER_FILES, Checkpoint
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.loading.tokenizer_files import with_settings
from nanovllm.options.validation import shown
from nanovllm.utils import disk_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FORMAT = 5
"""Raise it when the fields that are kept, or how the tokenizer is made, change."""
_PACKAGES = ("transformers", "tokenizers")
_MAX_KEPT = 16
"""Tokenizers kept on disk; the least recently used one goes first."""
_REMEDY = (
    "take the tokenizer.json and the tokenizer_config.json of another upload of this model, or let "
    'transformers write them: AutoTokenizer.from_pretrained("MODEL").save_pretrained("DIRECTORY"); '
    "tokenizer= names a directory that has them, and skip_tokenizer_init=True takes prompts as "
    "token ids"
)
_TIKTOKEN_MODEL = "tiktoken.model"
_KIMI_CLASS = "tokenization_kimi.TikTokenTokenizer"
_NUM_CONTROL = 256
"""Tokens after those of Kimi's file: those that tokenizer_config.json lists, and reserved ones."""
_LONGEST = 1024
"""Bytes of a token; the number of its merges grows with them."""
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What Kimi's text is split into; Chinese characters stand apart from other letters. Its
checkpoints have this in Python code, which is not run."""


def converted_tokenizer(checkpoint: Checkpoint) -> TextTokenizer:
    """Return the tokenizer of a GGUF file, or of a directory without tokenizer.json.

    Raises:
        CheckpointError: the files are invalid, or do not say all of a tokenizer.
    """
    path = checkpoint.tokenizer_path
    assert path is not None
    if not is_gguf(path):
        _check_is_kimi(path)
    elif (kept := _read_kept(path)) is not None:
        return kept
    try:
        if is_gguf(path):
            fields = _fields_of(convert_gguf_tokenizer(path, read_gguf(path).tokenizer))
        else:
            fields = _fields_of(_read_tiktoken(path))
        tokenizer = _from_fields(fields)
        tokenizer.decode(tokenizer.encode("a b"))  # raises for an id that is not a token
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:  # many kinds; a panic of tokenizers is not an Exception
        which = "its metadata" if is_gguf(path) else "one of its files"
        raise CheckpointError(
            f"cannot load the tokenizer in {path}: {which} is invalid: {error!s:.300}"
        ) from error
    if is_gguf(path):
        _keep(path, fields)
    return tokenizer


def _check_is_kimi(path: Path) -> None:
    """Raise CheckpointError unless directory `path` has the files of Kimi's tokenizer."""
    names = read_json(path / "tokenizer_config.json").get("auto_map")
    names = names.get("AutoTokenizer") if isinstance(names, dict) else None
    names = names if isinstance(names, list) else [names]
    is_kimi = any(isinstance(n, str) and n.rpartition("--")[2] == _KIMI_CLASS for n in names)
    if (path / _TIKTOKEN_MODEL).is_file():
        if is_kimi:
            return
        lacks = f"{_TIKTOKEN_MODEL}, and the code that comes with it is not {_KIMI_CLASS}"
    else:
        lacks = ", ".join(name for name in TOKENIZER_FILES if (path / name).is_file())
    raise CheckpointError(f"{path} has no tokenizer.json, only {lacks}: {_REMEDY}")


def _read_tiktoken(path: Path) -> TextTokenizer:
    """Return the tokenizer of directory `path`, which has Kimi's tiktoken.model."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = path / _TIKTOKEN_MODEL
    ranks = _ranks(file)
    converter: Any = TikTokenConverter(str(file), KIMI_PATTERN)
    converter.load_tiktoken_bpe = lambda _: ranks  # its own needs tiktoken, and trusts the file
    backend: Tokenizer = converter.converted()
    listed = read_json(path / "tokenizer_config.json").get("added_tokens_decoder") or {}
    for token_id in range(len(ranks), len(ranks) + _NUM_CONTROL):
        given = listed.get(str(token_id), {"content": f"<|reserved_token_{token_id}|>"})
        if backend.token_to_id(given["content"]) is not None:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: token {token_id}, {shown(given['content'])}, "
                f"is also token {backend.token_to_id(given['content'])}"
            )
        is_special = bool(given.get("special", True))
        token = AddedToken(given["content"], normalized=False, special=is_special)
        backend.add_tokens([token])
    return with_settings(path, backend)


def _ranks(file: Path) -> dict[bytes, int]:
    """Return the ranks of a file's tokens, which are their ids: 0, 1, 2 and so on."""
    ranks: dict[bytes, int] = {}
    try:
        content = file.read_bytes()
        refuse_pointer(file, content)
        for line in content.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error!s:.200}") from error
    if list(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise CheckpointError(f"{file}: its tokens must have the ranks 0, 1, 2 and so on")
    if (longest := max(map(len, ranks))) > _LONGEST:
        raise CheckpointError(
            f"{file}: a token has {longest} bytes; {_LONGEST} are the most that is read"
        )
    return ranks


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


def _read_kept(path: Path) -> TextTokenizer | None:
    """Return the tokenizer that was kept for a GGUF file; None if there is none."""
    directory = disk_cache.cache_directory(warn=False)
    if directory is None:
        return None
    file = directory / _name(path)
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


def _keep(path: Path, fields: Mapping[str, Any]) -> None:
    """Keep a tokenizer for the next start, if there is a safe place."""
    directory = disk_cache.cache_directory(warn=False)
    if directory is None:
        return
    with contextlib.suppress(OSError), disk_cache.new_directory(directory) as new:
        file = Path(new, _name(path))
        file.write_text(json.dumps(fields), encoding="utf-8")
        disk_cache.seal(file)
        disk_cache.store(file, directory)
        used = sorted(directory.glob("tokenizer-*.json"), key=lambda kept: kept.stat().st_mtime)
        for kept in used[:-_MAX_KEPT]:
            kept.unlink(missing_ok=True)


def _name(path: Path) -> str:
    """Return the name of the kept file: a hash of all that decides what transformers makes."""
    digest = hashlib.sha256(f"{_FORMAT} {[version(name) for name in _PACKAGES]} ".encode())
    weights = read_gguf(path).weights.values()
    with path.open("rb") as file:
        digest.update(file.read(min(weight.tensor.offset for weight in weights)))
    return f"tokenizer-{digest.hexdigest()[:32]}.json"
