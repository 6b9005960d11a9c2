"""Tokens become text one at a time: the text only grows, and equals that of decoding all at once.

A stop string ends it where a naive search of the decoded prefixes does.
"""

import functools
import re
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm import demo_model
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.every_case import examples

UNFINISHED = "\ufffd"
CHARACTERS = ["a", "the", "cat", ".", "'t", " ", "\n", "é", "e\u0301", "日", "本語", "你好", "👋"]
CHARACTERS += ["👩\u200d🚀", "👨\u200d👩\u200d👧", "नि", "\u200b", UNFINISHED, "\U0010ffff", "<s>"]
TEXTS = st.one_of(st.text(max_size=12), st.lists(st.sampled_from(CHARACTERS)).map("".join))


@functools.cache
def byte_level() -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(demo_model.MODEL).backend_tokenizer
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """Return a tokenizer like Llama's: ▁ is a space; characters without a token become bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*"▁abcdefghijklmnopqrstuvwxyz.,'", "é", "日", "本", UNFINISHED]
    merges = []
    for word in ("▁the", "▁cat", "▁a", "日本"):
        for end in range(2, len(word) + 1):
            tokens.append(word[:end])
            merges.append((word[: end - 1], word[end - 1]))
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def word_piece() -> Tokenizer:
    tokens = ["[UNK]", "<s>", "</s>", "the", "cat", "do", "##n", "n't", "'", "t", "'t", "##ing"]
    tokens += [".", ",", "日", "##本", "本", "é", "👋", "##👋", UNFINISHED, *"ace", "##a", "##e"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[UNK]", "<s>", "</s>"])
    return tokenizer


MAKERS = {maker.__name__: maker for maker in (byte_level, byte_fallback, word_piece)}
every_tokenizer = pytest.mark.parametrize("kind", MAKERS)


@functools.cache
def odd_token_ids(kind: str) -> list[int]:
    """Return special tokens, single bytes, and a letter."""
    tokenizer = MAKERS[kind]()
    special = [token for token, added in tokenizer.get_added_tokens_decoder().items()]
    letters = [token for letter in ("a", "▁", "Ġ") if (token := tokenizer.token_to_id(letter))]
    if kind == "byte_level":
        single = [*range(256)]
    else:
        single = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    return special + letters + [token for token in single if token is not None]


@st.composite
def outputs(draw: st.DrawFn, kind: str) -> list[int]:
    """Draw token ids: parts of encoded texts, perhaps cut inside a character, and random ids."""
    tokenizer = MAKERS[kind]()
    # Without the byte of a space: whether the decoder strips it depends on its place. Real
    # tokenizers encode a space as ▁.
    space = tokenizer.token_to_id("<0x20>")
    token = st.integers(0, tokenizer.get_vocab_size() - 1) | st.sampled_from(odd_token_ids(kind))
    token = token.filter(lambda token_id: token_id != space)
    token_ids: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            encoded = tokenizer.encode(draw(TEXTS), add_special_tokens=False).ids
            token_ids += encoded[: draw(st.integers(0, len(encoded)))]
        else:
            token_ids += draw(st.lists(token, max_size=8))
    return token_ids


def decode(kind: str, token_ids: Seq[int], skip_special_tokens: bool) -> str:
    """Return the text of all tokens, decoded at once.

    An invalid byte makes tokenizers' ByteFallback also replace the valid characters of the bytes
    right before it. A stream has sent these characters already, so here they stay.
    """
    tokenizer = MAKERS[kind]()
    whole: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    if kind != "byte_fallback":
        return whole
    special = set(tokenizer.get_added_tokens_decoder()) if skip_special_tokens else set()
    text, run, is_valid = "", b"", True
    for token_id in [*token_ids, None]:
        token = "" if token_id is None else tokenizer.id_to_token(token_id)
        if token_id in special:
            continue
        if byte := re.fullmatch("<0x(..)>", token):
            run += bytes.fromhex(byte[1])
            continue
        good = next(size for size in range(len(run), -1, -1) if is_utf8(run[:size]))
        is_valid = is_valid and good == len(run)
        text += run[:good].decode() + UNFINISHED * (len(run) - good) + token.replace("▁", " ")
        run = b""
    text = text.removeprefix(" ")
    assert text == whole or not is_valid
    return text


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def decoded_prefixes(kind: str, token_ids: Seq[int], skip_special_tokens: bool) -> list[str]:
    """Return the text expected before the first token, after each token, and after the end."""
    texts = [""]
    for count in range(1, len(token_ids) + 1):
        text = decode(kind, token_ids[:count], skip_special_tokens)
        texts.append(texts[-1] if text.endswith(UNFINISHED) else text)
    return [*texts, decode(kind, token_ids, skip_special_tokens)]


@every_tokenizer
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_text_grows_to_what_decoding_at_once_gives(
    kind: str, data: st.DataObject, skip_special_tokens: bool
) -> None:
    token_ids = data.draw(outputs(kind), label="token ids")
    tokenizer = MAKERS[kind]()
    special = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
    if skip_special_tokens and data.draw(st.booleans(), label="by their ids"):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, skipped=special)
    else:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    expected = decoded_prefixes(kind, token_ids, skip_special_tokens)
    pieces = []
    for token_id, before, after in zip(token_ids, expected[:-2], expected[1:-1], strict=True):
        assert detokenizer.add(token_id) is False
        assert after.startswith(before)
        assert detokenizer.text == after
        assert detokenizer.safe_length(finished=False) == len(after)
        pieces.append(after[len(before) :])
    assert detokenizer.finish() is False
    assert detokenizer.text == expected[-1]
    assert detokenizer.safe_length(finished=True) == len(expected[-1])
    assert expected[-1].startswith("".join(pieces))
    assert not expected[-1][len("".join(pieces)) :].strip(f" {UNFINISHED}")
    assert detokenizer.finish() is False
    assert detokenizer.text == expected[-1]


@every_tokenizer
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_tokens_at_once_equal_tokens_one_by_one(
    kind: str, data: st.DataObject, skip_special_tokens: bool
) -> None:
    token_ids = data.draw(outputs(kind), label="token ids")
    skipped = frozenset(token_ids[::3])
    one_by_one, at_once = (
        Detokenizer(MAKERS[kind](), skip_special_tokens=skip_special_tokens, skipped=skipped)
        for _ in range(2)
    )
    for token_id in token_ids:
        one_by_one.add(token_id)
    at_once.add_all(token_ids)
    one_by_one.finish()
    at_once.finish()
    assert at_once.text == one_by_one.text


def first_stop(
    texts: Seq[str], stops: Seq[str], num_unsearched: int
) -> tuple[int, int, int] | None:
    """Return (index into texts, start, end) of the first complete stop string.

    Of several that end together, the first listed counts.
    """
    for index in range(num_unsearched + 1, len(texts)):
        text = texts[index]
        for end in range(len(texts[index - 1]) + 1, len(text) + 1):
            for stop in stops:
                if text[:end].endswith(stop):
                    return index, end - len(stop), end
    return None


@every_tokenizer
@settings(max_examples=examples(30), deadline=None)
@given(
    data=st.data(),
    skip_special_tokens=st.booleans(),
    include_stop=st.booleans(),
    others=st.lists(st.sampled_from(["a", "zzzz", "日本", "👋", UNFINISHED, ". "]), max_size=2),
)
def test_stop_strings_end_where_a_naive_search_does(
    kind: str,
    data: st.DataObject,
    skip_special_tokens: bool,
    include_stop: bool,
    others: list[str],
) -> None:
    token_ids = data.draw(outputs(kind), label="token ids")
    texts = decoded_prefixes(kind, token_ids, skip_special_tokens)
    whole = texts[-1]
    stops = others
    for _ in range(
        data.draw(st.integers(1, 3), label="stop strings from the text") if whole else 0
    ):
        start = data.draw(st.integers(0, len(whole) - 1), label="start of a stop string")
        stops.append(whole[start : start + data.draw(st.integers(1, 6), label="its length")])
    stops = data.draw(st.permutations(stops), label="stop strings")
    num_unsearched = data.draw(
        st.integers(0, len(token_ids)) | st.just(0), label="tokens not searched"
    )
    expected = first_stop(texts, stops, num_unsearched)

    detokenizer = Detokenizer(
        MAKERS[kind](),
        skip_special_tokens=skip_special_tokens,
        stop=stops,
        include_stop=include_stop,
    )
    shown = ""
    stopped_after = None
    for count, token_id in enumerate(token_ids, start=1):
        if detokenizer.add(token_id, search=count > num_unsearched):
            stopped_after = count
            break
        safe = detokenizer.text[: detokenizer.safe_length(finished=False)]
        assert safe.startswith(shown)
        shown = safe
    if stopped_after is None and detokenizer.finish(search=True):
        stopped_after = len(token_ids) + 1

    if expected is None:
        assert stopped_after is None
        assert detokenizer.stop_string is None
        assert detokenizer.text == whole
    else:
        index, start, end = expected
        assert stopped_after == index
        assert detokenizer.stop_string == texts[index][start:end]
        assert detokenizer.text == texts[index][: end if include_stop else start]
        assert detokenizer.finish() is True
        assert detokenizer.text == texts[index][: end if include_stop else start]
    assert detokenizer.text.startswith(shown)
    assert detokenizer.safe_length(finished=True) == len(detokenizer.text)


def read(detokenizer: Detokenizer, token_ids: Seq[int], num_unsearched: int = 0) -> list[str]:
    """Add tokens until a stop string is complete; return the safe text after each token."""
    safe = []
    for count, token_id in enumerate(token_ids, start=1):
        if detokenizer.add(token_id, search=count > num_unsearched):
            break
        safe.append(detokenizer.text[: detokenizer.safe_length(finished=False)])
    return safe


TOKENS = ["the", "<s>", "</s>", "<s>", "cat", "</s>"]


@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_spaces_between_special_tokens(spaces: bool, skip_special_tokens: bool) -> None:
    """Only those between two adjacent special tokens are left out, and only if these are shown."""
    tokenizer = word_piece()
    token_ids = [tokenizer.token_to_id(token) for token in TOKENS]
    expected = " ".join(TOKENS) if spaces else "the <s></s><s> cat </s>"
    if skip_special_tokens:
        expected = "the cat"
    for all_at_once in (True, False):
        detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces,
        )
        if all_at_once:
            detokenizer.add_all(token_ids)
        else:
            for token_id in token_ids:
                detokenizer.add(token_id)
        detokenizer.finish()
        assert detokenizer.text == expected


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_broken_bytes_do_not_wait_for_ever(kind: str) -> None:
    """Symptom: each token decodes all broken bytes before it again; 8,000 of them take 8 s."""
    tokenizer = MAKERS[kind]()
    broken = tokenizer.encode("👋", add_special_tokens=False).ids[-1:]
    after = tokenizer.encode("👋 the cat", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    token_ids = [*broken * 200, *after]
    shown = read(detokenizer, token_ids)
    assert all(len(text) > count - 32 for count, text in enumerate(shown[:200], start=1))
    detokenizer.finish()
    assert detokenizer.text == decode(kind, token_ids, skip_special_tokens=True)
    assert detokenizer.text.endswith("👋 the cat")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_marks_stand_before_marked_tokens_only(kind: str, data: st.DataObject) -> None:
    """Without them the text is that of a Detokenizer, whether tokens come at once or not."""
    tokenizer = MAKERS[kind]()
    special = sorted(tokenizer.get_added_tokens_decoder())
    token_ids = data.draw(outputs(kind), label="token ids")
    for token_id in data.draw(
        st.lists(st.sampled_from(special), max_size=4), label="special tokens"
    ):
        token_ids.insert(
            data.draw(st.integers(0, len(token_ids)), label="place of a special token"), token_id
        )
    marked = frozenset(special[:2])
    plain = Detokenizer(tokenizer, skip_special_tokens=False)
    one_by_one, at_once = (
        Detokenizer(tokenizer, marked=marked, skip_special_tokens=False) for _ in range(2)
    )
    for token_id in token_ids:
        plain.add(token_id)
        one_by_one.add(token_id)
    at_once.add_all(token_ids)
    for detokenizer in (plain, one_by_one, at_once):
        detokenizer.finish()
    assert one_by_one.text == at_once.text
    assert one_by_one.text.replace(TOKEN_MARK, "") == plain.text
    assert one_by_one.text.count(TOKEN_MARK) == sum(i in marked for i in token_ids)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_be_a_marked_token(include: bool) -> None:
    tokenizer = MAKERS["byte_level"]()
    token_id = tokenizer.token_to_id("<|im_end|>")
    ids = [*tokenizer.encode("<|im").ids, token_id, *tokenizer.encode("a").ids]
    detokenizer = Detokenizer(
        tokenizer,
        marked=frozenset({token_id}),
        skip_special_tokens=False,
        stop=["<|im_end|>"],
        include_stop=include,
    )
    assert any(detokenizer.add(token) for token in ids)
    assert detokenizer.text == f"<|im{TOKEN_MARK}{'<|im_end|>' if include else ''}"
