"""Reads a directory's tokenizer: tokenizer.json is what splits text.

No class of transformers is asked, because some build a different tokenizer. The other files say
which tokens are special, and hold the chat templates. Nothing in them is trusted.
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import BertNormalizer

from nanovllm.errors import CheckpointError
from nanovllm.loading.files import read_json, refuse_pointer
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.options.validation import listed, shown

logger = logging.getLogger(__name__)

TOKENIZER_JSON = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NORMALIZER = {
    "lowercase": ("do_lower_case", True),
    "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}
"""Of BERT: fields of tokenizer_config.json, with their defaults."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_LISTED = 4
"""Tokens that one warning names."""
_BETWEEN = re.compile(r"[\s:,]*")
"""What may stand between two keys or values of a JSON object."""


def read_tokenizer(path: Path) -> TextTokenizer:
    """Return the tokenizer of directory `path`, which has a tokenizer.json.

    Raises:
        CheckpointError: a file is invalid; it names the file.
    """
    backend, longest_entry = _read_backend(path / TOKENIZER_JSON)
    tokenizer = with_settings(path, backend)
    tokenizer.longest_entry = longest_entry
    return tokenizer


def with_settings(path: Path, backend: Tokenizer) -> TextTokenizer:
    """Return a tokenizer with what the other files of directory `path` say of it.

    Args:
        backend: what splits text.

    Raises:
        CheckpointError: a file is invalid; it names the file.
    """
    settings = read_json(path / _CONFIG)
    if str(settings.get("tokenizer_class")).removesuffix("Fast") == "BertTokenizer":
        _set_normalizer(backend, path, settings)
    named, special = _special_tokens(path, settings)
    _add_tokens(backend, path, settings, special)
    _mark_special(backend, special)
    for name in ("bos", "eos"):
        _compare_template(backend, path, settings, name, named.get(f"{name}_token"))
    split = settings.get("split_special_tokens")
    backend.encode_special_tokens = split is True
    tokenizer = TextTokenizer(backend, named, read_chat_templates(path, settings))
    if "eos_token" in named and tokenizer.eos_token_id is None:
        logger.warning(
            "%s: eos_token %s is not a token of %s, so it does not end an answer",
            path / _CONFIG,
            shown(named["eos_token"]),
            TOKENIZER_JSON,
        )
    return tokenizer


def _set_normalizer(backend: Tokenizer, path: Path, settings: Mapping[str, Any]) -> None:
    """Set what transformers' class of BERT takes from tokenizer_config.json alone."""
    if not isinstance(backend.normalizer, BertNormalizer):
        return
    for field, (name, default) in _NORMALIZER.items():
        value = settings.get(name, default)
        if value is not default and not isinstance(value, bool):
            raise CheckpointError(f"{path / _CONFIG}: {name} must be a bool, is {shown(value)}")
        setattr(backend.normalizer, field, value)


def read_chat_templates(path: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template of directory `path`, or several by name; None if there is none.

    Separate files come before tokenizer_config.json, and that before chat_template.json, which
    is for models that see pictures.

    Args:
        settings: tokenizer_config.json.

    Raises:
        CheckpointError: a file cannot be read, or holds no template.
    """
    files = sorted((path / "additional_chat_templates").glob("*.jinja"))
    if (default := path / "chat_template.jinja").is_file():
        files.append(default)
    if files:
        texts = {"default" if file == default else file.stem: _read_text(file) for file in files}
        return texts["default"] if texts.keys() == {"default"} else texts
    for name in (_CONFIG, "chat_template.json"):
        found = (settings if name == _CONFIG else read_json(path / name)).get("chat_template")
        if isinstance(found, str):
            return found
        if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
            found = {entry.get("name"): entry.get("template") for entry in found}
        if not found:
            continue
        if not isinstance(found, dict) or not all(
            isinstance(text, str) for text in (*found, *found.values())
        ):
            raise CheckpointError(
                f"{path / name}: chat_template must be a text or a list of "
                f'{{"name": ..., "template": ...}}, is {shown(found)}'
            )
        return found
    return None


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


def _read_backend(file: Path) -> tuple[Tokenizer, int]:
    """Return what tokenizer.json says, and the length of its longest entry.

    It was tried once, and its ids are those of the file.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    refuse_pointer(file, content)
    try:
        backend: Tokenizer = Tokenizer.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
        backend.decode(backend.encode("a b").ids)
        longest_entry = _check_ids(backend, content.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of tokenizers is not an Exception
        raise CheckpointError(
            f"cannot load the tokenizer in {file.parent}: {file.name} is invalid: {error!s:.300}"
        ) from error
    return backend, longest_entry


def _check_ids(backend: Tokenizer, text: str) -> int:
    """Raise ValueError if `backend` has other ids than tokenizer.json, whose content is `text`.

    The library takes two tokens of one id, and it numbers the added tokens itself.

    Returns: the length of the vocabulary's longest entry: to get all of them takes long.
    """
    vocab = backend.get_vocab(with_added_tokens=False)
    token_of = {token_id: token for token, token_id in vocab.items()}
    if not vocab:
        raise ValueError("its vocabulary is empty")
    if len(token_of) < len(vocab):
        token, token_id = next(item for item in vocab.items() if token_of[item[1]] != item[0])
        raise ValueError(
            f"tokens {shown(token_of[token_id])} and {shown(token)} share id {token_id}"
        )
    for added in _added_tokens(text):
        content = added["content"]
        token_id = added["id"]
        found = backend.token_to_id(content)
        if content and found != token_id:  # an empty one is never used
            why = f"the next free id is {found}"
            if (other := backend.id_to_token(token_id)) is not None:
                why = f"this is the id of {shown(other)}"
            raise ValueError(f"added token {shown(content)} has id {token_id}, but {why}")
    around = backend.encode("")
    for token, token_id in zip(around.tokens, around.ids, strict=True):
        if (
            backend.token_to_id(token) not in (None, token_id)
            or backend.id_to_token(token_id) is None
        ):
            raise ValueError(
                f"its post_processor adds {shown(token)} with id {token_id}, which in its "
                f"vocabulary is {shown(backend.id_to_token(token_id))}"
            )
    return max(map(len, vocab))


def _added_tokens(text: str) -> list[dict[str, Any]]:
    """Return added_tokens of a tokenizer.json that the library has read.

    They come before the vocabulary, which takes long to parse.
    """
    decode = json.JSONDecoder().raw_decode
    end = text.index("{") + 1
    while text[(start := _end(text, end))] != "}":
        key, end = decode(text, start)
        value, end = decode(text, _end(text, end))
        if key == "added_tokens":
            return list(value)
    return []


def _end(text: str, start: int) -> int:
    found = _BETWEEN.match(text, start)
    assert found is not None
    return found.end()


def _special_tokens(path: Path, settings: dict[str, Any]) -> tuple[dict[str, str], set[str]]:
    """Return the texts of the special tokens that have a name, by name, and those of all."""
    sources = {_CONFIG: settings}
    if "added_tokens_decoder" not in settings:  # older files have another place for them
        sources["special_tokens_map.json"] = read_json(path / "special_tokens_map.json")
    named: dict[str, str] = {}
    others: list[Any] = []
    for source, fields in sources.items():
        found = dict(fields)
        for name in ("additional_special_tokens", "extra_special_tokens"):
            more = fields.get(name)
            if isinstance(more, dict):
                found |= more
            elif isinstance(more, list):
                others += more
        for name, value in found.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str) and text:
                named[name] = text
            elif name.removesuffix("_token") in _NAMED and text not in (None, ""):
                raise CheckpointError(
                    f"{path / source}: {name} must be the text of a token, is {shown(value)}"
                )
    texts = [value.get("content") if isinstance(value, dict) else value for value in others]
    return named, {*named.values(), *(text for text in texts if isinstance(text, str) and text)}


def _add_tokens(
    backend: Tokenizer, path: Path, settings: dict[str, Any], special: set[str]
) -> None:
    """Add tokens that other files list and tokenizer.json lacks, if they get the ids listed."""
    source = path / _CONFIG
    given = settings.get("added_tokens_decoder")
    if given is None:
        source = path / "added_tokens.json"
        ids = read_json(source)
        given = {
            token_id: {"content": text, "special": text in special, "normalized": False}
            for text, token_id in ids.items()
        }
    try:
        tokens = {
            int(token_id): AddedToken(
                token["content"],
                **{flag: value for flag in _FLAGS if (value := token.get(flag)) is not None},
            )
            for token_id, token in given.items()
        }
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{source}: added tokens must be ids with their texts: {error!s:.200}"
        ) from error
    others = []
    for token_id, token in sorted(tokens.items()):
        found = backend.token_to_id(token.content)
        if found is None and token.content and token_id == backend.get_vocab_size():
            backend.add_tokens([token])
            found = backend.token_to_id(token.content)
        if found != token_id and token.content:
            others.append(f"{shown(token.content)} is {found}, not {token_id}")
    if others:
        logger.warning(
            "%s lists tokens with other ids than tokenizer.json, which counts: %s",
            source,
            listed(others, _MAX_LISTED),
        )


def _mark_special(backend: Tokenizer, special: set[str]) -> None:
    """Make tokens of the vocabulary special: in a text they are a token, and output skips them."""
    added = backend.get_added_tokens_decoder()
    for text in sorted(special):
        token_id = backend.token_to_id(text)
        if token_id is None:
            continue
        token = added.get(token_id) or AddedToken(text, normalized=False)
        if not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _compare_template(
    backend: Tokenizer, path: Path, settings: dict[str, Any], name: str, text: str | None
) -> None:
    """Log a warning if tokenizer_config.json and tokenizer.json disagree on the ends of texts."""
    wanted = settings.get(f"add_{name}_token")
    adds = text is not None and text in backend.encode("").tokens
    if isinstance(wanted, bool) and text is not None and wanted != adds:
        logger.warning(
            "%s says add_%s_token=%s; tokenizer.json, which counts, %s %s",
            path / _CONFIG,
            name,
            str(wanted).lower(),
            "adds" if adds else "does not add",
            shown(text),
        )
