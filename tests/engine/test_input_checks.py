"""Prompts that are too long: refused for what a slice of them costs, and only where it is sure."""

from typing import Any

import pytest

from nanovllm import demo_model
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.hub import open_checkpoint
from nanovllm.loading.tokenizer import serving_tokenizer

LIMIT = 512


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    checkpoint = open_checkpoint(demo_model.MODEL)
    tokenizer, size = serving_tokenizer(checkpoint), checkpoint.config["vocab_size"]
    return InputProcessor(tokenizer, vocab_size=size, max_model_len=LIMIT, seed=0)


@pytest.mark.parametrize("rendered", [False, True])
def test_a_prompt_far_too_long_costs_a_slice(
    processor: InputProcessor, rendered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: 500,000 characters were encoded whole, for half a second, and then refused."""
    encode: Any = processor._encode
    lengths: list[int] = []

    def count(tokenizer: Any, text: str, **options: Any) -> Any:
        assert options["add_special_tokens"] is not rendered
        lengths.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(processor, "_encode", count)
    text = "The quick brown fox jumps over the lazy dog. " * 230
    processor.limit.check_text("the prompt", text)  # by its characters it might fit
    with pytest.raises(
        InvalidRequestError, match="too long: more than .* allows 511 prompt tokens"
    ):
        processor.make_request(Prompt(text, rendered=rendered))
    assert lengths == [8 * LIMIT]
    assert len(text) > 2 * 8 * LIMIT


@pytest.mark.parametrize("piece", ["word ", " " * 8, "<|im_end|>", "日本"])
def test_slices_refuse_nothing_that_fits(processor: InputProcessor, piece: str) -> None:
    """The longest text of each kind that fits is taken, and one token more is refused."""
    fits, too_long = 0, 2**16
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(processor.encode(piece * middle)) < LIMIT:
            fits = middle
        else:
            too_long = middle
    processor.make_request(piece * fits)
    with pytest.raises(InvalidRequestError, match="allows 511 prompt tokens"):
        processor.make_request(piece * too_long)
