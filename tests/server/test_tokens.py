"""Texts to token ids and back over HTTP, and what a client must know of the tokenizer."""

from typing import Any

import pytest

from nanovllm import AsyncLLM
from tests.server.conftest import Running

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1'}}


def test_tokenizer_info(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what lm-eval's RemoteTokenizer reads, and no path of this machine."""
    info = server.send("/tokenizer_info").body
    assert (info["bos_token"], info["eos_token"]) == (None, "<|im_end|>")
    assert info["pad_token"] == "<|endoftext|>"
    assert "message.content" in info["chat_template"]
    assert isinstance(info["tokenizer_class"], str)
    (eos,) = server.send("/tokenize", {"prompt": info["eos_token"]}).body["tokens"]
    assert info["added_tokens_decoder"][str(eos)] == "<|im_end|>"
    assert not any(isinstance(value, str) and value.startswith("/") for value in info.values())
    monkeypatch.setattr(server.state, "chat_template", "{{ messages }}")
    assert server.send("/tokenizer_info").body["chat_template"] == "{{ messages }}"


def test_special_tokens_are_added_if_asked(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str, *, rendered: bool) -> list[int]:  # the shipped tokenizer adds none
        return [rendered]

    monkeypatch.setattr(server.state.llm.engine.input_processor, "encode", encode)
    conversation: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    for given, without in (({"prompt": "a"}, False), (conversation, True)):
        for asked in (None, True, False):
            tokens = server.send("/tokenize", {**given, "add_special_tokens": asked}).body["tokens"]
            assert tokens == [without if asked is None else not asked]


def test_every_door_prepares_a_conversation_alike(server: Running, async_llm: AsyncLLM) -> None:
    """`render` is that of `LLM.chat` and of the rows of a batch."""
    result: dict[str, Any] = {"content": None, "tool_call_id": "c", "name": ""}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi", "tool_calls": [], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": ""},
        {"role": "function", **result},
        {"role": "assistant", "reasoning": "Hm.", "content": "Done.", "extra": {"a": 1}},
    ]
    ids = async_llm.render(messages, add_generation_prompt=True)
    assert server.send("/tokenize", {"messages": messages}).body["tokens"] == ids
    chat = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    assert server.send("/v1/chat/completions", chat).body["prompt_token_ids"] == ids
    function = CALL["function"]
    assert isinstance(function, dict)
    items: list[dict[str, Any]] = [
        *messages[:1],
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", **function, "provider_specific_fields": {}},
        {"type": "function_call_output", "call_id": "c", "output": None},
        {"type": None, "role": "assistant", "content": "Done."},
    ]
    found = server.send("/v1/responses", {"input": items, "max_output_tokens": 1}).body
    assert found["usage"]["input_tokens"] == len(ids)
