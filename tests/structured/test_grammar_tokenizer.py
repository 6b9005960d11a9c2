"""Marks such as <|im_end|> are tokens that no text holds, whatever kind the tokenizer is of."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from nanovllm import StructuredOutputsParams, demo_model
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.features.structured.grammar_tokenizer import grammar_tokenizer

pytest.importorskip("llguidance")

PLAIN = [AddedToken("[TOOL]"), AddedToken("\n\n", normalized=False)]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(Path(demo_model.MODEL) / "tokenizer.json"))
    tokenizer.add_tokens(PLAIN)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Return one like Llama 2's. Marks are in its vocabulary, and merges make one of them."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab += ["▁", *"<>/sabelnotuy[]TOL", "s>", "<s>x", "\n\n", "ye", "▁ye"]
    merges = [("s", ">"), ("<", "s>"), ("<s>", "x"), ("y", "e"), ("▁", "ye")]
    vocab += ["x"]
    ids = {token: token_id for token_id, token in enumerate(vocab)}
    options: dict[str, Any] = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(ids, merges, **options))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(PLAIN)
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "SentencePiece": sentencepiece()}


def forced(tokenizer: Tokenizer, **form: Any) -> list[int]:
    """Return the tokens of the one output that a form has."""
    compiler = GrammarCompiler(tokenizer.to_str, tokenizer.get_vocab_size(), (2,))
    matcher = compiler.matcher(StructuredOutputsParams(**form))
    found: list[int] = []
    while not matcher.is_stopped():
        (token, *_) = matcher.compute_ff_tokens()
        assert matcher.try_consume_tokens([token]) == 1
        found.append(token)
    return found


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("mark", ["<s>", "</s>", "<think>", "<|im_end|>", "[TOOL]", "<s>x"])
def test_the_text_of_a_mark_is_made_of_ordinary_tokens(kind: str, mark: str) -> None:
    """Symptom: an output that must hold such a text ends at it, or fails."""
    tokenizer = TOKENIZERS[kind]
    for text in (mark, f"a {mark} b", f"{mark}{mark}"):
        found = forced(tokenizer, choice=[text])
        assert tokenizer.decode(found) == text
        assert tokenizer.token_to_id(mark.removesuffix("x")) not in found
        assert tokenizer.decode(forced(tokenizer, json={"const": text})) == json.dumps(text)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_are_unchanged(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    described = grammar_tokenizer(tokenizer.to_str())
    found, expected = Tokenizer.from_str(described.text).get_vocab(), tokenizer.get_vocab()
    assert sorted(found.values()) == sorted(expected.values())
    marks = described.mark_ids
    assert marks == {token: expected[token] for token in marks}
    assert "[TOOL]" in marks
    assert found.items() >= {item for item in expected.items() if item[0] not in marks}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_added_tokens_that_mark_nothing_are_text(kind: str) -> None:
    """Some vocabularies add runs of spaces and line ends, which their models are used to."""
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.token_to_id("\n\n") in forced(tokenizer, choice=["a\n\nb"])


def test_a_grammar_may_name_marks() -> None:
    tokenizer = TOKENIZERS["byte level"]
    think = tokenizer.token_to_id("<think>")
    grammar = 'start: <think> "<think>" /[<]think>/ x // <think> "\nx: %json {"const": "<think>"}'
    found = forced(tokenizer, grammar=grammar)
    assert found.count(think) == 1
    assert found[0] == think
    assert tokenizer.decode(found) == '<think><think><think>"<think>"'
    described = grammar_tokenizer(tokenizer.to_str())
    for text in ('"<think>', "/<think>", "# <think>", "<thinker>", "< think>"):
        assert described.with_mark_ids(text) == text


@pytest.mark.parametrize("text", ["yes", " yes", "  yes", " "])
@pytest.mark.parametrize("form", ["choice", "regex", "grammar"])
def test_a_space_at_the_start_is_in_the_text(text: str, form: str) -> None:
    """Symptom: with a tokenizer like Llama 2's, a choice of " yes" gives "yes"."""
    tokenizer = TOKENIZERS["SentencePiece"]
    given = {"choice": [text], "regex": text, "grammar": f'start: "{text}"'}[form]
    assert tokenizer.decode(forced(tokenizer, **{form: given})) == text
