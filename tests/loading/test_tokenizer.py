"""How much text one token can hold: never too little, and unknown where text may vanish.

And the bytes of each token, which are those of the text.
"""

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from nanovllm import demo_model
from nanovllm.loading.hub import open_checkpoint
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.loading.tokenizer import serving_tokenizer, token_bound, token_bytes
from tests.engine.test_detokenizer import MAKERS

DEMO: Any = serving_tokenizer(open_checkpoint(demo_model.MODEL))
LONGEST = sorted(DEMO.get_vocab(), key=len)[-8:]
PIECES = [DEMO.backend_tokenizer.decoder.decode([token]) for token in LONGEST]
PIECES += ["<|im_start|>", " ", "\n", "é", "e\u0301", "α\u0313\u0300\u0345", "日", "👋", "\u200b"]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join) | st.text(min_size=1))
@settings(deadline=None)
def test_no_token_holds_more_characters(text: str) -> None:
    bound = token_bound(DEMO)
    assert bound is not None
    assert len(text) <= bound.chars_per_token * len(DEMO.encode(text))


@given(st.text(alphabet="ab\n é日👋\U000f0000\x04", min_size=1))
@settings(deadline=None)
def test_bytes_that_the_vocabulary_lacks_count_for_nothing(text: str) -> None:
    """As in SmolLM2's vocabulary: they are in no token, so a text of them may have none."""
    backend = byte_level()
    vocab = [token for token in backend.get_vocab() if token not in "\u0104é¥ó"]  # 4, e9, a5, f3
    model = models.BPE({token: index for index, token in enumerate(vocab)}, [("a", "b")])
    tokenizer = TextTokenizer(byte_level(model=model), {})
    bound = token_bound(tokenizer)
    assert bound is not None
    assert bound.lost_bytes == b"\x04\xa5\xe9\xf3"
    assert bound.least_tokens([text, text]) <= 2 * len(tokenizer.encode(text))
    assert bound.least_tokens([text]) == (
        (len(text) - sum(text.encode().count(byte) for byte in bound.lost_bytes)) / 6
    )


def test_nfc_makes_at_least_two_bytes_of_three_characters() -> None:
    """What the bound rests on, for all characters that Unicode composes."""
    for code in range(0x110000):
        parts = unicodedata.normalize("NFD", chr(code))
        composed = unicodedata.normalize("NFC", parts)
        if 0xD800 <= code < 0xE000 or len(parts) == 1:
            continue
        assert len(parts) <= 1.5 * len(composed.encode())


def byte_level(**changes: Any) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab", "abcd"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def bound_of(backend: Tokenizer) -> float | None:
    bound = token_bound(TextTokenizer(backend, {}))
    return None if bound is None else bound.chars_per_token


def test_longest_entry_sets_the_bound() -> None:
    backend = byte_level()
    assert bound_of(backend) == 1.5 * 4
    backend.add_special_tokens(["<日本>"])
    assert bound_of(backend) == 1.5 * 8


STRIPPED = AddedToken("<mask>", lstrip=True)
SPLITS = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Sequence(SPLITS)},
        {"pre_tokenizer": None},
        {"model": models.BPE({"a": 0}, []), "normalizer": normalizers.NFC()},
        {"model": models.WordLevel({"a": 0}, unk_token="a")},
    ],
    ids=repr,
)
def test_tokenizer_that_may_drop_text_has_no_bound(changes: dict[str, Any]) -> None:
    assert bound_of(byte_level(**changes)) is None


def test_added_token_that_takes_spaces_has_no_bound() -> None:
    backend = byte_level()
    backend.add_tokens([STRIPPED])
    assert bound_of(backend) is None


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("text", ["the cat's", "é 日本語 👋 <x>", "a<s>cat</s>", "  a\n\tdo"])
def test_bytes_of_tokens_are_those_of_the_text(kind: str, text: str) -> None:
    backend = MAKERS[kind]()
    tokenizer = TextTokenizer(backend, {})
    token_ids = backend.encode(text, add_special_tokens=False).ids
    found = [token_bytes(tokenizer)(token_id) for token_id in token_ids]
    whole = backend.decode(token_ids, skip_special_tokens=False)
    if kind == "word_piece":  # its decoder joins some tokens behind others
        assert b"".join(found).replace(b" ", b"").decode() == whole.replace(" ", "")
    else:  # the decoder leaves out the first space
        assert b"".join(found).removeprefix(b" " * (found[0][:1] == b" ")).decode() in (
            whole,
            whole.removeprefix(" "),
        )


def test_bytes_of_a_token_that_the_vocabulary_lacks() -> None:
    """Models have more logits than their tokenizers have tokens."""
    assert token_bytes(DEMO)(10**6) == b""
    assert token_bytes(DEMO)(DEMO.backend_tokenizer.token_to_id("<|im_end|>")) == b"<|im_end|>"


RUNS = st.builds(lambda piece, times: piece * times, st.sampled_from(PIECES), st.integers(1, 300))


@given(st.lists(RUNS | st.text(max_size=40), min_size=2, max_size=9).map("".join), st.data())
@settings(deadline=None)
def test_what_follows_changes_only_the_end_of_a_slice(text: str, data: st.DataObject) -> None:
    """What `InputProcessor` rests on when it counts the tokens of a slice; it leaves out 256."""
    size = data.draw(st.integers(1, len(text) or 1), label="size of the slice")
    settled = DEMO.encode(text[:size])[:-64]
    assert settled == DEMO.encode(text)[: len(settled)]
