"""What a GGUF file says of its tokens: what its tokenizer needs, and which ones end a text.

Imports no torch.
"""

from typing import Any

from nanovllm.checkpoint.gguf_metadata import Metadata
from nanovllm.errors import CheckpointError
from nanovllm.options.validation import check_bool, check_int

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
_SPECIAL_TYPES = (3, 4)
"""`tokenizer.ggml.token_type` of control tokens and user-defined ones: their text is one token."""
_MAX_TOKEN_BYTES = 4 * 2**20
_MAX_SPECIAL_TOKENS = 8192
"""Gemma 3 has 6414."""


def tokenizer_settings(metadata: Metadata) -> dict[str, Any]:
    """Return tokenizer.ggml's "model" and "pre"; "add_bos_token" and "add_space_prefix" if given;
    and the model's "architecture".

    Returns {} if there are no tokens.

    Raises:
        CheckpointError: what transformers reads of the tokenizer has wrong types, or is so much
            that its work would take minutes.
    """
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    if tokens is None:
        return {}
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int), ("scores", float)):
        values = metadata.values.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise CheckpointError(
                f"{metadata.file}: tokenizer.ggml.{key} is no list of {kind.__name__}"
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
    found["architecture"] = metadata.architecture
    for key in ("add_bos_token", "add_space_prefix"):
        name = f"tokenizer.ggml.{key}"
        if (value := metadata.values.get(name)) is not None:
            found[key] = check_bool(CheckpointError, f"{metadata.file}: {name}", value)
    return found


def eos_token_ids(metadata: Metadata, vocab_size: int) -> list[int]:
    """Return the tokens that end a text: those the file names, and known ends of a turn."""
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
