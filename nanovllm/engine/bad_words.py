"""Words that an output may not have, as token ids. Knows no requests."""

from collections.abc import Callable, Iterable

from nanovllm.engine.prompt import check_unicode
from nanovllm.engine.prompt_limit import PromptLimit


def encode_bad_words(
    words: Iterable[str], encode: Callable[[str], list[int]], limit: PromptLimit
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to forbid for `words`.

    As in vLLM, each word is encoded as it stands and after a space; the second form counts if it
    has as many tokens as the first.

    Args:
        encode: returns the token ids of a text, without special tokens.

    Raises:
        InvalidRequestError: a word is too long or not valid Unicode, or `encode` raises it.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        check_unicode("a word of bad_words", word)
        limit.check_text("a word of bad_words", word)
        bare = word.lstrip() or word  # a word of white space only stays as it is
        plain, spaced = tuple(encode(bare)), tuple(encode(" " + bare))
        found += [plain] if plain else []
        if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(found)
