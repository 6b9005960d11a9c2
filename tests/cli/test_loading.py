"""What a chat samples with, and what a command says of the model that answers."""

import io
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm import AsyncLLM, SamplingParams, demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.llm import LLM
from tests.checkpoints import copy_checkpoint
from tests.server.conftest import running

CHAT = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Of a model that recommends nothing."""
NAMES = ("temperature", "top_k", "top_p", "min_p")
PLAIN = {name: getattr(SamplingParams(), name) for name in NAMES}
FAST = ["--num-kvcache-blocks", "64", "--max-model-len", "512", "--enforce-eager"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters of each request."""
    found: list[SamplingParams] = []
    stream = LLM.stream

    def noted(self: LLM, prompt: Any, params: SamplingParams) -> Any:
        found.append(params)
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", noted)
    return found


@pytest.mark.parametrize(
    ("recommended", "flags", "changes", "said"),
    [
        ({}, [], {}, "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05"),
        ({"eos_token_id": 2}, ["--top-k", "5"], {"top_k": 5}, "temperature 0.8, top_p 0.95, min_"),
        ({"repetition_penalty": 1.1}, ["--min-p", "0"], {"min_p": 0.0}, "temperature 0.8, top_k"),
        ({}, ["--temperature", "0"], {"temperature": 0.0}, None),
        ({"do_sample": False}, [], {**PLAIN, "temperature": 0.0}, None),
        ({"top_p": 0.9}, [], {**PLAIN, "top_p": 0.9}, None),
        ({}, ["--generation-config", "vllm"], PLAIN, None),
    ],
)
def test_a_chat_samples_well_where_the_checkpoint_recommends_nothing(
    asked: list[SamplingParams],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recommended: dict[str, Any],
    flags: list[str],
    changes: dict[str, Any],
    said: str | None,
) -> None:
    model = copy_checkpoint(demo_model.MODEL, tmp_path, generation_config=recommended)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["chat", model, *FAST, "--max-tokens", "1", *flags]) == 0
    assert [{name: getattr(params, name) for name in NAMES} for params in asked] == [
        {**CHAT, **changes}
    ]
    err = capsys.readouterr().err
    assert err.count("recommends no sampling, so a chat takes ") == (said is not None)
    assert said is None or f"so a chat takes {said}" in err


@pytest.mark.parametrize(
    ("recommended", "option", "expected"),
    [
        ({}, "auto", {**CHAT, "top_k": 5}),
        ({"top_p": 0.9}, "auto", {"top_k": 5}),
        ({}, "vllm", {"top_k": 5}),
    ],
)
def test_a_chat_with_a_server_samples_so_too(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recommended: dict[str, Any],
    option: str,
    expected: dict[str, Any],
) -> None:
    """Clients that give nothing get the checkpoint's, or else OpenAI's defaults."""
    model = copy_checkpoint(demo_model.MODEL, tmp_path, generation_config=recommended)
    llm = AsyncLLM(model, generation_config=option, num_kvcache_blocks=64, max_model_len=512)
    sent: list[dict[str, Any]] = []
    stream = httpx.Client.stream

    def noted(client: httpx.Client, *words: str, json: Any) -> Any:
        sent.append({name: json[name] for name in NAMES if name in json})
        return stream(client, *words, json=json)

    monkeypatch.setattr(httpx.Client, "stream", noted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    with running(llm) as server:
        named = ["--model", server.send("/v1/models").body["data"][0]["id"]]
        for words in ([], named):
            url = ["--url", server.url, "--top-k", "5", "--max-tokens", "1"]
            assert cli.main(["chat", *url, *words]) == 0
            sys.stdin.seek(0)
    llm.shutdown()
    assert sent == [expected] * 2


def test_generate_samples_so_with_chat_only(asked: list[SamplingParams], tmp_path: Path) -> None:
    """Without, it has the library's and the server's defaults, which are vLLM's."""
    model = copy_checkpoint(demo_model.MODEL, tmp_path, generation_config={})
    for more in (["--chat"], []):
        assert cli.main(["generate", model, "Hi", *FAST, "--max-tokens", "1", *more]) == 0
    found = [{name: getattr(params, name) for name in NAMES} for params in asked]
    assert found == [CHAT, PLAIN]


def test_a_name_that_is_no_model_is_no_prompt_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "llama3.2", "Hi"]) == 2
    assert capsys.readouterr().err == (
        "nanovllm: 'llama3.2' names no model: a model is a directory, a GGUF file, or a hub id, "
        "which is OWNER/NAME (a prompt? nanovllm generate --model MODEL llama3.2); did you mean "
        "one such as 'meta-llama/Llama-3.2-1B-Instruct'?\n"
    )


def test_such_a_name_is_a_path_or_a_prompt_if_it_can_only_be_that(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    copy_checkpoint(demo_model.MODEL, tmp_path / "llama3.2")
    flags = [*FAST, "--max-tokens", "5", "--temperature", "0"]
    assert cli.main(["generate", "llama3.2", "Hi", *flags]) == 0
    assert cli.main(["generate", "--model", "llama3.2", "qwen3", *flags]) == 0
    assert capsys.readouterr().err == ""
