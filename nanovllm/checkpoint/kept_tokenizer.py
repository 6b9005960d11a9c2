"""A tokenizer without transformers: what transformers made of a checkpoint's files is kept on disk.

Importing transformers and making a tokenizer with it takes 0.8 s at each start, reading what was
kept a few milliseconds. Knows no prompts and no requests.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence as Seq
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from nanovllm.checkpoint.gguf import is_gguf, read_gguf
from nanovllm.checkpoint.hub import Checkpoint, opened_files
from nanovllm.errors import CheckpointError
from nanovllm.utils import disk_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FORMAT = 2
"""Raise it when the fields that are kept, or how the tokenizer is made, change."""
_PACKAGES = ("transformers", "tokenizers")
_MAX_KEPT = 16
"""Tokenizers kept on disk; the one that was not used for longest goes first."""


class KeptTokenizer:
    """The part of a transformers tokenizer that serving a model needs, by the same names.

    Args:
        fields: the tokenizer.json, the special tokens and the chat templates: see `fields_of`.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.backend_tokenizer = Tokenizer.from_str(fields["backend"])
        self.backend_tokenizer.encode_special_tokens = fields["split_special_tokens"]
        self.eos_token_id: int | None = fields["eos_token_id"]
        self.special_tokens_map: dict[str, str] = fields["special_tokens_map"]
        self.all_special_ids: list[int] = fields["all_special_ids"]
        self.chat_template: str | dict[str, str] | None = fields["chat_template"]

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool = False) -> str:
        ids = list(token_ids)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_ids: Seq[int]) -> list[str | None]:
        """Return the vocabulary's entries; None for an id without one."""
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in token_ids]

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all entries, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the template for a conversation: `chat_template`, if given, or the one it names.

        Raises:
            ValueError: there is none, or there are several and none is the default.
        """
        own = self.chat_template
        if isinstance(own, dict):
            wanted = ["tool_use", "default"] if tools is not None else ["default"]
            names = wanted if chat_template is None else [chat_template]
            found = next((own[name] for name in names if name in own), chat_template)
            if found is None:
                raise ValueError(f"give chat_template: one of {', '.join(sorted(own))}")
            return found
        if (found := own if chat_template is None else chat_template) is None:
            raise ValueError("there is no chat template")
        return found


def fields_of(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Return what makes a `KeptTokenizer` that does what `tokenizer` does."""
    backend: Any = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return {
        "backend": backend.to_str(),
        "split_special_tokens": bool(backend.encode_special_tokens),
        "eos_token_id": tokenizer.eos_token_id,
        "special_tokens_map": dict(tokenizer.special_tokens_map),
        "all_special_ids": list(tokenizer.all_special_ids),
        "chat_template": tokenizer.chat_template,
    }


def read_kept(checkpoint: Checkpoint) -> KeptTokenizer | None:
    """Return the tokenizer that was kept for the checkpoint's files; None if there is none."""
    directory = disk_cache.cache_directory(warn=False)
    if directory is None:
        return None
    file = directory / _name(checkpoint)
    try:
        content = disk_cache.check_file(file)
        found = KeptTokenizer(json.loads(content))
        os.utime(file)  # it was used now
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged, or made by a library that this one cannot read
        logger.info("making the tokenizer again: %s", error)
        return None
    return found


def keep(checkpoint: Checkpoint, fields: dict[str, Any]) -> None:
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
    yield repr(checkpoint.config.get("model_type")).encode()
    for file_name in opened_files(path):
        try:
            yield file_name.encode()
            yield (path / file_name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path / file_name}: {error}") from error
