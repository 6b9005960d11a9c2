"""The checkpoint's tokenizer: how it is loaded, and what text one of its tokens holds."""

import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import models

from nanovllm.errors import ConfigError
from nanovllm.loading.files import is_gguf
from nanovllm.loading.hub import Checkpoint
from nanovllm.loading.text_tokenizer import (
    TextTokenizer,
    byte_level_chars,
    transformers_tokenizer,
)
from nanovllm.loading.tokenizer_files import TOKENIZER_JSON, read_tokenizer
from nanovllm.options.validation import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def serving_tokenizer(checkpoint: Checkpoint) -> TextTokenizer | None:
    """Return the checkpoint's tokenizer, None if it has none; run no code of the checkpoint.

    tokenizer.json is read as it is. transformers makes the tokenizer only where there is none.

    Raises:
        CheckpointError: a file is invalid, or the files do not say all of a tokenizer.
    """
    path = checkpoint.tokenizer_path
    if path is None:
        logger.warning("%s: no tokenizer, so prompts must be token ids", checkpoint.path)
        return None
    if not is_gguf(path) and (path / TOKENIZER_JSON).is_file():
        return read_tokenizer(path)
    from nanovllm.loading.converted_tokenizer import converted_tokenizer  # reads other forms

    return converted_tokenizer(checkpoint)


def load_tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase | None":
    """Return what `serving_tokenizer` returns as a transformers tokenizer.

    Raises:
        CheckpointError: as for `serving_tokenizer`.
    """
    tokenizer = serving_tokenizer(checkpoint)
    return None if tokenizer is None else transformers_tokenizer(tokenizer)


def check_same_vocabulary(tokenizer: TextTokenizer, draft: Checkpoint) -> None:
    """Check that `draft`, the checkpoint of a draft network, has the tokens of `tokenizer`.

    A draft without tokenizer files is taken to have them.

    Raises:
        ConfigError: a token differs.
        CheckpointError: as for `load_tokenizer`.
    """
    if draft.tokenizer_path is None:
        return
    other = serving_tokenizer(draft)
    assert other is not None
    found = other.get_vocab()
    expected = tokenizer.get_vocab()
    different = expected.items() ^ found.items()
    if different:
        token, _ = min(different, key=lambda item: (item[1], item[0]))
        raise ConfigError(
            f"speculative_config: the draft network {draft.path} has another tokenizer than the "
            f"model: token {shown(token)} is {found.get(token, 'missing')} in the draft's "
            f"vocabulary and {expected.get(token, 'missing')} in the model's"
        )


class TokenBound(NamedTuple):
    """How little a tokenizer can make of a text."""

    chars_per_token: float
    """One token holds no more characters."""
    lost_bytes: bytes = b""
    """Bytes of UTF-8 that are in no token: the vocabulary lacks them."""

    def least_tokens(self, texts: Iterable[str]) -> float:
        """Return how many tokens the texts have at least."""
        num_chars = 0
        for text in texts:
            num_chars += len(text)
            if self.lost_bytes:  # a character has one of them or more
                data = text.encode()
                num_chars -= len(data) - len(data.translate(None, self.lost_bytes))
        return num_chars / self.chars_per_token


def token_bound(tokenizer: TextTokenizer) -> TokenBound | None:
    """Return the bound of a tokenizer; None if there is none that is certain.

    Byte-level BPE has one: each byte of the normalised text that the vocabulary has is in one
    token, and no token is longer than the longest entry of the vocabulary. NFC makes at least 2
    bytes of 3 characters. Other tokenizers may drop text, or make one token of any number of
    unknown characters.
    """
    backend: Any = tokenizer.backend_tokenizer
    model = backend.model
    added = backend.get_added_tokens_decoder().values()
    normalizer = _steps(backend.normalizer)
    pre_tokenizer = _steps(backend.pre_tokenizer)
    chars = byte_level_chars().items()
    lost = bytes(byte for byte, char in chars if model.token_to_id(char) is None)
    keeps_other_bytes = (
        type(model) is models.BPE
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and all(step["type"] == "NFC" for step in normalizer)
        and not (normalizer and lost)
        and any(step["type"] == "ByteLevel" for step in pre_tokenizer)
        and all(
            step["type"] in ("ByteLevel", "Digits")
            or (step["type"] == "Split" and step["behavior"] != "Removed")
            for step in pre_tokenizer
        )
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not keeps_other_bytes:
        return None
    # An entry of a byte-level vocabulary has one character for each byte.
    sizes = [len(token.content.encode()) for token in added]
    longest = max([tokenizer.longest_entry, *sizes])
    return TokenBound(longest * 1.5, lost)


def token_bytes(tokenizer: TextTokenizer) -> Callable[[int], bytes]:
    """Return a function that gives the bytes of a token, also where a character has several tokens.

    They are those of the vocabulary's entry. So a space that a decoder leaves out at the start of a
    text is there.
    """
    backend: Any = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    kinds = {step["type"] for step in _steps(backend.decoder)}
    byte_of = {char: byte for byte, char in byte_level_chars().items()}

    @cache
    def bytes_of(token_id: int) -> bytes:
        entry: str = backend.id_to_token(token_id) or ""
        if token_id in added:
            return entry.encode()
        if "ByteLevel" in kinds:
            known = all(char in byte_of for char in entry)
            return bytes(byte_of[char] for char in entry) if known else entry.encode()
        if "ByteFallback" in kinds and (byte := re.fullmatch("<0x([0-9A-F]{2})>", entry)):
            return bytes.fromhex(byte[1])
        # What the decoder adds for it after another token.
        once, twice = (backend.decode([token_id] * count) for count in (1, 2))
        text: str = twice[len(once) :]
        return text.encode()

    return bytes_of


def _steps(component: Any) -> list[dict[str, Any]]:
    """Return the settings of each step of a normalizer, pre-tokenizer or decoder; none for None."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    lists = (settings.get(name) for name in ("normalizers", "pretokenizers", "decoders"))
    steps: list[dict[str, Any]] = next((each for each in lists if each is not None), [settings])
    return steps
