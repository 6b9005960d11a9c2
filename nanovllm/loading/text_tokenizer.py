"""`TextTokenizer`: what text becomes which tokens, special tokens and chat templates.

Imports transformers only for a user who asks for its tokenizer.
"""

import itertools
from collections.abc import Mapping, Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextTokenizer:
    """A checkpoint's tokenizer, as far as serving needs it, by transformers' names.

    Args:
        backend: what splits text; it neither pads nor cuts from now on.
        special_tokens: their texts by name, such as "eos_token".
        chat_template: one, or several by name; None if there is none.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None if none does."""
        text = self.special_tokens_map.get("eos_token")
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    @cached_property
    def longest_entry(self) -> int:
        """Characters of the vocabulary's longest entry, added tokens aside."""
        return max(map(len, self.backend_tokenizer.get_vocab(with_added_tokens=False)))

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


def transformers_tokenizer(tokenizer: TextTokenizer) -> "PreTrainedTokenizerBase":
    """Return a transformers tokenizer that does what `tokenizer` does: it has a copy of it."""
    from transformers import PreTrainedTokenizerFast

    named = tokenizer.special_tokens_map
    added = tokenizer.added_tokens_decoder.values()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        split_special_tokens=tokenizer.backend_tokenizer.encode_special_tokens,
        additional_special_tokens=[
            token.content
            for token in added
            if token.special and token.content not in named.values()
        ],
        **named,
    )


def byte_level_chars() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level vocabulary: itself if it is
    printable, otherwise one from 256 on (Radford et al., 2019).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
