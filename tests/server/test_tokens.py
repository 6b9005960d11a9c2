"""Texts to token ids and back over HTTP, and what a client must know of the tokenizer."""

from typing import Any

import pytest

from tests.server.conftest import Running


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
