"""The tokenizer in a GGUF file, and the tokens that end a text.

transformers converts it; what it leaves out is added here. Imports no torch.
"""

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.gguf_header import GGUFMetadata
from nanovllm.loading.text_tokenizer import byte_level_chars
from nanovllm.options.validation import check_bool, check_int, shown

logger = logging.getLogger(__name__)

_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<turn|>",
    "<|tool_response>",
)
"""Tokens that end a turn wherever they are in a vocabulary, as in llama.cpp."""
_HARMONY = {"<|return|>", "<|call|>", "<|end|>"}
"""A vocabulary with these is gpt-oss's, whose "<|end|>" ends a message and not the turn."""
_CONTROL = 3
_SPECIAL_TYPES = (_CONTROL, 4)
"""`tokenizer.ggml.token_type` of control tokens and user-defined ones: their text is one token."""
_MAX_TOKEN_BYTES = 4 * 2**20
_MAX_SPECIAL_TOKENS = 8192
"""Gemma 3 has 6414."""


def tokenizer_settings(metadata: GGUFMetadata) -> dict[str, Any]:
    """Return tokenizer.ggml's "model", "pre", "tokens" and "token_type"; "add_bos_token" and
    "add_space_prefix" if given; and the model's "architecture".

    Returns {} if there are no tokens.

    Raises:
        CheckpointError: what transformers reads of the tokenizer has wrong types, or is so much
            that reading it would take minutes.
    """
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    if tokens is None:
        return {}
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int), ("scores", float)):
        values = metadata.values.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise CheckpointError(
                f"{metadata.file}: tokenizer.ggml.{key} is not a list of {kind.__name__}"
            )
        if key in ("token_type", "scores") and values and len(values) != len(tokens):
            raise CheckpointError(
                f"{metadata.file}: tokenizer.ggml.{key} has {len(values)} elements for "
                f"{len(tokens)} tokens"
            )
    num_bytes = sum(map(len, tokens))
    types = metadata.values.get("tokenizer.ggml.token_type", [])
    num_special = sum(value in _SPECIAL_TYPES for value in types)
    if num_bytes > _MAX_TOKEN_BYTES or num_special > _MAX_SPECIAL_TOKENS:
        raise CheckpointError(
            f"{metadata.file}: tokenizer.ggml.tokens has {num_bytes} characters and {num_special} "
            f"special tokens; at most {_MAX_TOKEN_BYTES} and {_MAX_SPECIAL_TOKENS} are read"
        )
    metadata.text("tokenizer.chat_template", "")
    found: dict[str, Any] = {
        key: metadata.text(f"tokenizer.ggml.{key}", "") for key in ("model", "pre")
    }
    found |= {"architecture": metadata.architecture, "tokens": tokens, "token_type": types}
    for key in ("add_bos_token", "add_space_prefix"):
        name = f"tokenizer.ggml.{key}"
        if (value := metadata.values.get(name)) is not None:
            found[key] = check_bool(CheckpointError, f"{metadata.file}: {name}", value)
    return found


def eos_token_ids(metadata: GGUFMetadata, vocab_size: int) -> list[int]:
    """Return the tokens that end a text: those that the file names, and known ends of a turn."""
    found = set()
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        key = f"tokenizer.ggml.{key}"
        if (token := metadata.values.get(key)) is not None:
            name = f"{metadata.file}: {key}"
            found.add(check_int(CheckpointError, name, token, 0, vocab_size - 1))
    tokens = metadata.values.get("tokenizer.ggml.tokens") or []
    types = metadata.values.get("tokenizer.ggml.token_type") or []
    numbered = enumerate(zip(tokens, types, strict=False))  # a file may have one without the other
    special = {text: index for index, (text, kind) in numbered if kind in _SPECIAL_TYPES}
    ends = {*_END_TOKENS} - ({"<|end|>"} if special.keys() >= _HARMONY else set())
    found |= {special[text] for text in ends if special.get(text, vocab_size) < vocab_size}
    return sorted(found)


_MODELS = ("gpt2", "llama", "gemma4")
_SPLIT_LIKE_GPT2 = ("", "default", "gpt-2", "gpt2", "exaone4", "olmo")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Pre-tokenizers that split off each digit and then split as GPT-2's does."""
_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken")
"""Pre-tokenizers whose words are looked up before they are merged, and that add a BOS token."""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_SPLITS = {
    "hunyuan": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|{_SPACES}",
    ),
    "hunyuan-dense": _DEEPSEEK3,
    "deepseek-v3": _DEEPSEEK3,
    "seed-coder": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        rf"|{_SPACES}",
    ),
}
"""Pre-tokenizers that transformers does not know: the patterns that split text, one after the
other, as in llama.cpp."""


def convert_gguf_tokenizer(file: Path, settings: Mapping[str, Any]) -> Any:
    """Return transformers' tokenizer made from GGUF `file`, with its chat template.

    Raises:
        UnsupportedModelError: the tokenizer is of another kind than byte-level BPE, SentencePiece's
            BPE and Gemma's.
        Exception: whatever transformers raises for contents that make no sense.
    """
    from transformers import PreTrainedTokenizerFast

    if settings.get("model") not in _MODELS:
        raise UnsupportedModelError(
            f"{file}: tokenizer.ggml.model {shown(settings.get('model'))} is not supported "
            f"({', '.join(_MODELS)}); give tokenizer"
        )
    with tempfile.TemporaryDirectory() as directory:  # transformers also reads a file's neighbours
        link = Path(directory) / "model.gguf"
        try:
            link.symlink_to(file.absolute())
        except OSError:  # Windows asks for a right that most users lack
            link.hardlink_to(file.absolute())
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file="model.gguf")
    if settings["model"] == "gpt2":
        _name_special_tokens(tokenizer, settings["tokens"], settings["token_type"])
    _complete(tokenizer, settings, file)
    return tokenizer


def _name_special_tokens(tokenizer: Any, texts: list[str], types: list[int]) -> None:
    """Give the special tokens of a byte-level `tokenizer` their own texts.

    transformers spells a text that has other characters than the alphabet of bytes, such as
    "<｜User｜>", in that alphabet, so no text becomes the token.
    """
    numbered = enumerate(zip(texts, types, strict=False))
    special = {text: (index, kind) for index, (text, kind) in numbered if kind in _SPECIAL_TYPES}
    backend: Tokenizer = tokenizer.backend_tokenizer
    if all(backend.token_to_id(text) == index for text, (index, _) in special.items()):
        return
    chars = byte_level_chars()
    alphabet = {*chars.values()}
    vocab = {}
    for index, text in enumerate(texts):
        is_spelled = text in special or alphabet.issuperset(text)
        vocab[text if is_spelled else "".join(chars[byte] for byte in text.encode())] = index
    parts = json.loads(backend.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {each["content"]: each for each in parts["added_tokens"] if each["content"] in vocab}
    for text, (_, kind) in special.items():
        added[text] = {**flags, "content": text, "special": kind == _CONTROL}
    parts["added_tokens"] = [{**each, "id": vocab[text]} for text, each in added.items()]
    parts["model"]["vocab"] = vocab
    parts["post_processor"] = None  # it has ids
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.update_post_processor()


def _complete(tokenizer: Any, settings: Mapping[str, Any], file: Path) -> None:
    """Change `tokenizer` where transformers leaves out what the file says."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    pre = settings.get("pre", "")
    before = str(backend.pre_tokenizer)
    if settings["model"] == "gemma4" or settings["architecture"] in ("gemma2", "gemma3"):
        return  # transformers has a class for them
    if settings["model"] == "llama":
        if not settings.get("add_space_prefix", True):
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
            backend.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
    elif pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif pre in _SPLITS:
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    elif pre in _WORDS_FIRST:
        backend.model.ignore_merges = True
        if "add_bos_token" not in settings:
            tokenizer.add_bos_token = True
    elif pre not in _SPLIT_LIKE_GPT2 and "Split" not in before:
        logger.warning(
            "%s: tokenizer.ggml.pre %s is unknown: text is split as for GPT-2, so its tokens may "
            "differ from those that the model was trained on",
            file,
            shown(pre),
        )
