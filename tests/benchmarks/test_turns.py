"""benchmarks/turns.py on small models."""

from collections.abc import Callable
from typing import Any

from benchmarks.turns import Sizes, Turn, converse
from nanovllm import demo_model


def test_later_turns_compute_what_is_new(
    make_llm: Any, shared_checkpoint: Callable[..., str]
) -> None:
    """With a chat template, and with random tokens."""
    without_tokenizer = shared_checkpoint(vocab_size=600, max_position_embeddings=1024)
    for model in (demo_model.MODEL, without_tokenizer):
        llm = make_llm(model, max_model_len=1024 if model == without_tokenizer else 3000)
        first, *later = converse(llm, "nanovllm", Sizes(200, 60, 16), 3, tools=True)
        assert first.prompt == first.new == first.computed > 200
        assert 0 < first.first <= first.seconds
        for turn in later:
            assert 60 <= turn.new < 250
            assert turn.new <= turn.computed < turn.new + 64 + 16
        if model == without_tokenizer:
            assert [turn.prompt for turn in (first, *later)] == [260, 336, 412]
            assert [turn.new for turn in later] == [60, 60]


def test_what_is_too_many() -> None:
    assert Turn(6000, 100, 1124, 1, 1).is_good()
    assert not Turn(6000, 100, 1125, 1, 1).is_good()
