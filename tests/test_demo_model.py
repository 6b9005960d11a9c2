"""The model that ships with the package answers its questions exactly, with any options."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import demo_model
from tests.glossary import GREEDY


def ask(llm: Any, **template: Any) -> list[tuple[str, str]]:
    """Return each question and the model's answer in a chat."""
    tokenizer = llm.get_tokenizer()
    questions = [question for question, _ in demo_model.entries()]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
            **template,
        )
        for question in questions
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert all(output.finish_reason == "stop" for output in outputs)
    return list(zip(questions, (output.text for output in outputs), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_every_question_exactly(make_llm: Any, dtype: str) -> None:
    llm = make_llm(demo_model.MODEL, dtype=dtype)
    assert ask(llm) == demo_model.entries()
    assert ask(llm, enable_thinking=False) == demo_model.entries()


def test_answers_a_plain_prompt(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL)
    outputs = llm.generate(
        [question for question, _ in demo_model.entries()], GREEDY, use_tqdm=False
    )
    assert [output.text.strip() for output in outputs] == [a for _, a in demo_model.entries()]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"num_kvcache_blocks": 32, "max_model_len": 256, "kvcache_block_size": 8},
    ],
)
def test_answers_stay_exact_with_any_options(make_llm: Any, options: dict[str, Any]) -> None:
    assert ask(make_llm(demo_model.MODEL, **options)) == demo_model.entries()


def test_answers_stay_exact_on_two_ranks(tensor_parallel_llm: Any) -> None:
    assert ask(tensor_parallel_llm(demo_model.MODEL, 2)) == demo_model.entries()


def test_model_ships_within_4_mib() -> None:
    assert len(demo_model.entries()) >= 60
    assert sum(f.stat().st_size for f in Path(demo_model.MODEL).rglob("*")) <= 4 * 2**20
