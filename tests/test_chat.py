"""Conversations: chat templates, several conversations at once, bad messages."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import InvalidRequestError
from tests.checkpoints import copy_checkpoint
from tests.every_case import examples
from tests.glossary import ANSWER_TO, GREEDY, OPTIONS, QUESTION, QUESTIONS
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
    many = llm.chat([[user(question)] for question in QUESTIONS[:8]], GREEDY, use_tqdm=False)
    assert [output.text for output in many] == [ANSWER_TO[question] for question in QUESTIONS[:8]]


def test_an_answer_ends_at_the_tokenizers_token_though_config_json_names_another(
    make_llm: Any, tmp_path: Path
) -> None:
    """As in Qwen 3.5's files, without a generation_config.json."""
    model = copy_checkpoint(demo_model.MODEL, tmp_path, eos_token_id=1019)
    (tmp_path / "generation_config.json").unlink()
    llm = make_llm(model, **OPTIONS)
    (output,) = llm.chat([user(QUESTION)], GREEDY, use_tqdm=False)
    (found,) = output.outputs
    assert (found.text, found.finish_reason) == (ANSWER_TO[QUESTION], "stop")
    assert found.stop_reason is None
    assert llm.engine.scheduler.eos_token_ids == {1019, 1021}


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
    questions = QUESTIONS[:5]
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


class Pydantic:
    """Stands for an object of the openai package."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self.fields


ECHO = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
"""A template that shows what it is given."""


def echo(llm: LLM, *messages: Any, **options: Any) -> str:
    """Return what a template sees of messages."""
    token_ids = llm.render(list(messages), **{"chat_template": ECHO, **options})
    return llm.get_tokenizer().decode(token_ids)


def test_text_parts_are_joined(llm: LLM) -> None:
    """Symptom: the model reads "[{'type': 'text', 'text': ...}]"."""
    parts = [
        {"type": "text", "text": "one"},
        Pydantic(type="input_text", text="two"),
        "three",
        {"type": "refusal", "refusal": "no"},
        {"type": "text", "text": ""},
    ]
    assert echo(llm, {"role": "user", "content": parts}) == "[user:one\ntwo\nthree\nno\n]"
    assert echo(llm, {"role": "user", "content": []}) == "[user:]"
    (output,) = llm.chat(
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}], GREEDY, use_tqdm=False
    )
    assert output.text == ANSWER_TO[QUESTION]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url', but the model reads text"),
        ({"type": "input_audio", "input_audio": {}}, "content part of type 'input_audio'"),
        ({"text": "x"}, "content part of type None"),
        ({"type": ["text"]}, "content part of type"),
        (5, "content part of type None"),
        ({"type": "text"}, 'message 1: the "text" of a content part must be a string'),
        ({"type": "text", "text": 5}, "must be a string"),
    ],
)
def test_parts_that_are_not_text_are_refused(llm: LLM, part: Any, message: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    with pytest.raises(InvalidRequestError, match=message):
        echo(llm, user("Hi"), {"role": "user", "content": content})


def test_pydantic_messages_are_read(llm: LLM) -> None:
    message = Pydantic(role="user", content=QUESTION, name=None)
    assert echo(llm, message, user("Hi")) == f"[user:{QUESTION}][user:Hi]"
    outputs = llm.chat([message], GREEDY, use_tqdm=False)
    assert [output.text for output in outputs] == [ANSWER_TO[QUESTION]]
    template = (
        "{% for m in messages %}{{ (m.tool_calls or [0])[0] | tojson }}{{ m.content }}{% endfor %}"
    )
    function = Pydantic(name="f", arguments="{}")
    calls = [Pydantic(id="call 1", type=None, function=function)]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    shown = '{"id": "call 1", "function": {"name": "f", "arguments": {}}}'
    assert echo(llm, call, chat_template=template) == shown


def test_reasoning_has_two_names(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    new = {**user("a"), "reasoning": "new"}
    old = {**user("a"), "reasoning_content": "old"}
    assert echo(llm, new, old, {**old, **new}, chat_template=template) == "newoldold"


def test_output_has_the_rendered_text(llm: LLM) -> None:
    """Symptom: the prompt of a chat's output is None."""
    (output,) = llm.chat([user("Hi")], dataclasses.replace(GREEDY, max_tokens=1), use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert type(output.prompt) is str
    assert llm.get_tokenizer().encode(output.prompt) == output.prompt_token_ids


@pytest.mark.parametrize("begun", ["Paged attention", "Paged attention ", "Paged\n\n", "", " "])
@pytest.mark.parametrize("filters", ["", " | trim"])
def test_final_message_is_continued(llm: LLM, begun: str, filters: str) -> None:
    template = "".join(["{% for m in messages %}<{{ m.content", filters, " }}>{% endfor %}"])
    messages = [user("Hi"), {"role": "assistant", "content": begun}]
    options = {"chat_template": template, "continue_final_message": True}
    token_ids = llm.render(messages, **options)
    assert llm.get_tokenizer().decode(token_ids) == f"<Hi><{begun.strip() if filters else begun}"
    if begun.strip():
        tokenizer = llm.get_tokenizer()
        assert token_ids == tokenizer.apply_chat_template(messages, return_dict=False, **options)


def test_chat_continues_the_final_message(llm: LLM) -> None:
    answer = ANSWER_TO[QUESTION]
    cut = answer.rindex(" ")
    messages = [user(QUESTION), {"role": "assistant", "content": answer[:cut]}]
    (output,) = llm.chat(
        messages, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt is not None
    assert output.prompt.endswith(answer[:cut])
    assert output.text == answer[cut:]
    for wrong, match in (
        (messages, "set add_generation_prompt=False"),
        ([user("Hi"), {"role": "assistant", "tool_calls": []}], "no content"),
    ):
        with pytest.raises(InvalidRequestError, match=match):
            llm.chat(
                wrong,
                GREEDY,
                use_tqdm=False,
                continue_final_message=True,
                add_generation_prompt=wrong is messages,
            )
    with pytest.raises(InvalidRequestError, match="leaves out the final message"):
        llm.render(messages, continue_final_message=True, chat_template="nothing")


def test_half_a_surrogate_pair_is_refused(llm: LLM) -> None:
    """Symptom: TextEncodeInput must be Union[TextInputSequence, ...]."""
    tools = [{"type": "function", "function": {"name": "f\ud800"}}]
    sentence = "the conversation is not valid Unicode text: .*surrogates not allowed"
    for message, options in (
        (user("Hi \ud800"), {}),
        (user("Hi"), {"chat_template": "\ud800"}),
        (user("Hi"), {"chat_template": "{{ tools | tojson }}", "tools": tools}),
    ):
        with pytest.raises(InvalidRequestError, match=sentence):
            llm.chat([message], GREEDY, use_tqdm=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": 5}, "a template is a string, got 5"),
        ({"chat_template": "{% for %}"}, "the chat template cannot render this: Expected"),
        ({"tools": 5}, "cannot render this: .*not iterable"),
        ({"tools": [object()]}, "object is not a JSON value"),
        ({"chat_template_kwargs": 5}, "must be a dictionary of names to values, got 5"),
        ({"chat_template_kwargs": {1: 2}}, "must be a dictionary of names to values"),
        ({"chat_template_kwargs": {"messages": []}}, "'?messages'? is not an option"),
        ({"chat_template_kwargs": {"x": 10**5000}}, "cannot render this"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, str) else None,
)
def test_bad_options_are_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    given = {"chat_template": "{% for tool in tools or [] %}{% endfor %}a", **options}
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat([user("Hello!")], GREEDY, use_tqdm=False, **given)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
KEYS = st.sampled_from(["role", "content", "type", "text", "tool_calls", "name", "reasoning"])
PART = st.dictionaries(KEYS, st.sampled_from(["text", "image_url"]) | JSON)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.text(st.characters()) | st.lists(PART, max_size=3) | JSON,
        "tool_calls": JSON,
    },
)


@given(
    messages=st.lists(MESSAGE | JSON, max_size=4) | JSON,
    options=st.dictionaries(
        st.sampled_from(["tools", "add_generation_prompt", "continue_final_message", "x"]), JSON
    ),
)
@settings(max_examples=examples(100), deadline=None)
def test_any_messages_are_rendered_or_refused(demo_llm: LLM, messages: Any, options: Any) -> None:
    message = ""
    try:
        assert all(type(token) is int for token in demo_llm.render(messages, **options))
    except InvalidRequestError as error:
        message = str(error)
    assert len(message) < 600


@pytest.mark.parametrize(
    "messages",
    [None, "Hello!", [[]], [5], [[5]], [[user("Hello!")], user("Hello!")], [user("Hello! " * 500)]],
    ids=lambda messages: repr(messages)[:40],
)
def test_bad_messages_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, GREEDY, use_tqdm=False)


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
