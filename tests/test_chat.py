"""Conversations: chat templates, several conversations at once, bad messages."""

from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import InvalidRequestError
from tests.glossary import ANSWER_TO, GREEDY, QUESTION, QUESTIONS
from tests.helpers import generate, join

pytestmark = pytest.mark.usefixtures("idle_afterwards", "no_endless_wait")


@pytest.fixture
def llm(demo_llm: LLM) -> LLM:
    return demo_llm


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_chat_answers_one_conversation_or_many(llm: LLM) -> None:
    (one,) = llm.chat([user(QUESTION)], GREEDY, use_tqdm=False)
    assert one.text == ANSWER_TO[QUESTION]
    many = llm.chat([[user(question)] for question in QUESTIONS], GREEDY, use_tqdm=False)
    assert [output.text for output in many] == [ANSWER_TO[question] for question in QUESTIONS]


def test_chat_renders_system_message_and_earlier_turns(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        user("Hello!"),
        {"role": "assistant", "content": ANSWER_TO["Hello!"]},
        user(QUESTION),
    ]
    (output,) = llm.chat(tuple(conversation), GREEDY, use_tqdm=False)
    assert output.text == ANSWER_TO[QUESTION]
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
    decode = llm.get_tokenizer().decode
    assert decode(output.prompt_token_ids) == turns + "<|im_start|>assistant\n"
    open_ended = llm.render(conversation, add_generation_prompt=False)
    assert decode(open_ended) == turns


def test_chat_passes_options_to_the_template(llm: LLM) -> None:
    options = {"enable_thinking": False}
    questions = QUESTIONS[:20]
    outputs = llm.chat(
        [[user(question)] for question in questions],
        GREEDY,
        use_tqdm=False,
        chat_template_kwargs=options,
    )
    decode = llm.get_tokenizer().decode
    for question, output in zip(questions, outputs, strict=True):
        assert decode(output.prompt_token_ids).endswith("assistant\n<think>\n\n</think>\n\n")
        assert output.text == ANSWER_TO[question]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (output,) = llm.chat([user(QUESTION)], GREEDY, use_tqdm=False, chat_template=template)
    assert output.text == " " + ANSWER_TO[QUESTION]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        7,
        "Hello!",
        [[]],
        [None],
        [5],
        ["Hello!"],
        [[5]],
        [user("Hello!"), 5],
        [[user("Hello!")], user("Hello!")],
        [{"role": "user"}],
        [{"content": "Hello!"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [user("Hello! " * 500)],
    ],
    ids=lambda messages: repr(messages)[:40],
)
def test_bad_messages_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_template_that_does_not_parse_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        llm.chat([user("Hello!")], GREEDY, use_tqdm=False, chat_template="{% for %}")


def test_chat_needs_a_tokenizer(make_llm: Any, random_model: str) -> None:
    llm = make_llm(random_model)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.chat([user("Hello!")], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="no tokenizer.*stop_token_ids"):
        llm.stream([1, 2, 3], SamplingParams(stop=["x"]))
    pieces = list(llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=5)))
    assert {piece.text for piece in pieces} == {""}
    assert (
        join(pieces)[0].token_ids
        == generate(llm, [1, 2, 3], SamplingParams(temperature=0, max_tokens=5)).token_ids
    )
