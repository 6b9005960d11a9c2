"""`--chat-template` and `--root-path`."""

from pathlib import Path

import pytest

from nanovllm import AsyncLLM
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.errors import ConfigError

pytest.importorskip("fastapi")

from nanovllm.apps.server.output_parsers.tool_formats import MISTRAL
from tests.chat.family_templates import TEMPLATES
from tests.server.conftest import running

CHAT = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 2}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}[TOOL_CALLS]{% endfor %}"
)


def test_template_of_the_server(async_llm: AsyncLLM, tmp_path: Path) -> None:
    """The file's template renders, and says how tools are called; the LLM keeps its own."""
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    tokenizer = async_llm.get_tokenizer()
    own, expected = tokenizer.chat_template, tokenizer.encode("<|im_start|>What is a KV cache?")
    for given in (str(file), TEMPLATE):
        with running(async_llm, chat_template=given) as server:
            ids = server.send("/tokenize", {"messages": CHAT["messages"]}).body["tokens"]
            assert ids[: len(expected)] == expected
            reply = server.send("/v1/chat/completions", CHAT)
            assert reply.status == 200
            assert reply.body["usage"]["prompt_tokens"] == len(ids)
            assert server.state.answer_format._tools is MISTRAL
    assert tokenizer.chat_template == own


def test_a_checkpoint_without_a_template(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to do; with a template of the server's, conversations work."""
    tokenizer = async_llm.engine.input_processor.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with running(async_llm) as server:
        assert not server.state.has_chat_template
        reply = server.send("/v1/chat/completions", CHAT)
        assert reply.status == 400
        for advice in ("has no chat template", "--chat-template", "/v1/completions"):
            assert advice in reply.body["error"]["message"]
    with running(async_llm, chat_template=TEMPLATE) as server:
        assert server.state.has_chat_template
        assert server.send("/v1/chat/completions", CHAT).status == 200


def test_variables_of_the_template_that_the_server_gives(async_llm: AsyncLLM) -> None:
    """They hold in every route; those of a request come before them."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}{{ mode }}"
    defaults = {"mood": "block", "mode": "table"}
    with running(
        async_llm, chat_template=template, default_chat_template_kwargs=defaults
    ) as server:

        def text(**fields: object) -> str:
            body = {"messages": [{"role": "user", "content": "KV "}], **fields}
            ids = server.send("/tokenize", body).body["tokens"]
            prompt: str = server.send("/detokenize", {"tokens": ids}).body["prompt"]
            return prompt

        assert text() == "KV blocktable"
        assert text(chat_template_kwargs={"mode": "pool"}) == "KV blockpool"
    with pytest.raises(ConfigError, match="default_chat_template_kwargs must be a dictionary"):
        ServerOptions(default_chat_template_kwargs=[1])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chat_template", "/no/such/file", "chat_template '/no/such/file' cannot be read: No such"),
        ("chat_template", "", "chat_template must be a string that is not empty"),
        ("root_path", "llm", 'root_path must begin with "/" and not end with it'),
        ("root_path", "/llm/", 'root_path must begin with "/" and not end with it'),
        ("root_path", "", 'root_path must begin with "/" and not end with it'),
    ],
)
def test_options_that_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**{name: value})


def test_a_proxy_may_leave_its_path_or_not(async_llm: AsyncLLM) -> None:
    with running(async_llm, root_path="/llm", api_keys=["key"]) as server:
        for path in ("/llm/v1/models", "/v1/models"):
            assert server.send(path).status == 401
            assert server.send(path, Authorization="Bearer key").status == 200
        assert server.send("/health").status == 200
        schema = server.send("/llm/openapi.json", Authorization="Bearer key").body
        assert schema["servers"] == [{"url": "/llm"}]
        for path in ("/llm/v1/messages", "/v1/messages"):  # refused by a guard, and by the route
            assert server.send(path, {}).body["type"] == "error"
            assert server.send(path, {}, Authorization="Bearer key").body["type"] == "error"
        lost = server.send("/llm/v1/chat/completion", Authorization="Bearer key")
        assert "'/v1/chat/completions'" in lost.error["message"]


@pytest.mark.parametrize("family", ["DeepSeek-R1-Distill", "SmolLM3"])
def test_a_function_that_must_be_called_is_in_the_prompt(async_llm: AsyncLLM, family: str) -> None:
    """Symptom: a grammar forces a call of a function that the model was never shown."""
    function = {"name": "weather", "parameters": {"properties": {"city": {"enum": ["Rome"]}}}}
    tools = [{"type": "function", "function": function}]
    # This model would not end its thoughts.
    options = {"chat_template": TEMPLATES[family], "reasoning_parser": "none"}
    with running(async_llm, **options) as server:
        asked = {"messages": CHAT["messages"], "tools": tools}
        tokens = server.send("/tokenize", asked).body["tokens"]
        assert "weather" in server.send("/detokenize", {"tokens": tokens}).body["prompt"]
        reply = server.send(
            "/v1/chat/completions", {**asked, "tool_choice": "required", "max_tokens": 128}
        )
        assert reply.body["usage"]["prompt_tokens"] == len(tokens)
        (call, *_) = reply.body["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
