"""Adapters as models: those of lora_modules, and those that clients load and unload."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, LoRARequest, SamplingParams, demo_model
from nanovllm.apps.server.app import make_app
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.errors import ConfigError
from nanovllm.features.lora.adapter_registry import AdapterRegistry
from tests.glossary import QUESTION
from tests.lora.adapters import linears_of, write_adapter
from tests.server.conftest import Running, running

LOAD, UNLOAD, COMPLETE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with adapters a and b, which change the answer, and what is no adapter."""
    home: Path = tmp_path_factory.mktemp("adapters") / "home"
    linears = linears_of(demo_model.MODEL)
    for seed, name in enumerate(("a", "b", "../outside")):
        write_adapter(home / name, linears, seed=seed, r=2, size=4.0)
    (home / "waits").mkdir()
    os.mkfifo(home / "waits" / "adapter_config.json")
    (home / "link").symlink_to(home.parent / "outside")
    (home / "loop").symlink_to(home / "loop")
    (home / "inner").mkdir()
    shutil.copy(home / "a" / "adapter_config.json", home / "inner")
    weights = home.parent / "outside" / "adapter_model.safetensors"
    (home / "inner" / weights.name).symlink_to(weights)
    return home


@pytest.fixture(scope="module")
def adapted(front: str, home: Path) -> Iterator[Running]:
    options = {"max_model_len": 512, "num_kvcache_blocks": 512, "enforce_eager": True}
    llm = AsyncLLM(demo_model.MODEL, enable_lora=True, max_loras=2, **options)
    with running(llm, lora_modules=(f"first={home / 'a'}",), lora_directory=str(home)) as found:
        yield found
    llm.shutdown()


def complete(server: Running, model: str | None, **more: Any) -> str:
    body = {"prompt": QUESTION, "max_tokens": 8, "temperature": 0, "model": model, **more}
    reply = server.send(COMPLETE, body)
    assert reply.status == 200, reply.body
    assert reply.body["model"] == (model or "model")
    return str(reply.body["choices"][0]["text"])


def test_options_are_checked(adapted: Running, async_llm: AsyncLLM, home: Path) -> None:
    for llm, options, message in (
        (async_llm, {"lora_directory": str(home)}, "lora_directory=.* but enable_lora is False"),
        (
            async_llm,
            {"lora_modules": (f"a={home / 'a'}",)},
            "lora_modules=.* give enable_lora=True",
        ),
        (adapted.state.llm, {"lora_directory": str(home / "gone")}, "is not a directory"),
        (
            adapted.state.llm,
            {"lora_modules": (f"first={home / 'a'}", f"b={home}")},
            "has no adapter_config",
        ),
        (adapted.state.llm, {"lora_modules": (f"model={home / 'a'}",)}, "another model's name"),
        (adapted.state.llm, {"lora_modules": ("a",)}, "must be name=path"),
        (adapted.state.llm, {"lora_modules": ('{"name": "a"}',)}, '"base_model_name": ...}, got'),
    ):
        with pytest.raises(ConfigError, match=message):
            make_app(llm, ServerOptions(**options))


def test_the_model_of_a_request_selects_an_adapter(adapted: Running, home: Path) -> None:
    """In each route, streamed and whole; the answer has the name and the text of the adapter."""
    cards = {card["id"]: card for card in adapted.send("/v1/models").body["data"]}
    assert cards.keys() == {"model", "first"}
    assert (cards["first"]["parent"], cards["first"]["root"]) == ("model", str(home / "a"))
    assert adapted.send("/v1/models/first").body["id"] == "first"
    texts: dict[str, set[str]] = {}
    messages = [{"role": "user", "content": QUESTION}]
    for model in cards:
        chat = {"model": model, "messages": messages, "max_tokens": 8}
        response = {"model": model, "input": QUESTION, "max_output_tokens": 8}
        whole = [adapted.send("/v1/chat/completions", chat).body]
        whole.append(adapted.send("/v1/responses", response).body)
        assert [answer["model"] for answer in whole] == [model] * 2
        texts[model] = {whole[0]["choices"][0]["message"]["content"]}
        texts[model].add(whole[1]["output"][0]["content"][0]["text"])
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
            streamed = adapted.send(path, {**body, "stream": True}).body
            assert f'"model":"{model}"' in streamed
            lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
            texts[model].add("".join(map(delta_of, map(json.loads, lines))))
        assert len(texts[model]) == 1
    assert texts["model"] != texts["first"]
    assert complete(adapted, "model") != complete(adapted, "first")
    error = adapted.send(COMPLETE, {"prompt": "a", "model": "second"})
    assert (error.status, error.error["code"]) == (404, "model_not_found")
    assert error.error["message"].endswith("this server has 'model', 'first'")


def delta_of(event: dict[str, Any]) -> str:
    """Return the text in an event of a chat or of a response."""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def test_the_answers_are_those_of_the_library(adapted: Running, home: Path) -> None:
    adapter = LoRARequest("first", 1, str(home / "a"))
    options = {"max_model_len": 512, "num_kvcache_blocks": 64, "enforce_eager": True}
    llm = LLM(demo_model.MODEL, enable_lora=True, **options)
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate([QUESTION], params, use_tqdm=False, lora_request=adapter)
    assert complete(adapted, "first") == output.outputs[0].text


def test_adapters_come_and_go(adapted: Running) -> None:
    """Names, replacing in place, and what a request keeps that was admitted before."""
    of_a, of_base = complete(adapted, "first"), complete(adapted, "model")
    done = adapted.send(LOAD, {"lora_name": "new", "lora_path": "b"})
    assert done[:2] == (200, "Success: LoRA adapter 'new' added successfully.")
    of_b = complete(adapted, "new")
    assert len({of_a, of_base, of_b}) == 3
    again = adapted.send(LOAD, {"lora_name": "new", "lora_path": "a"})
    assert (again.status, again.error["param"]) == (400, "lora_name")
    assert "set load_inplace to true" in again.error["message"]
    stream: Any = adapted.client().completions.create(
        model="new",
        prompt=QUESTION,
        max_tokens=300,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = next(stream).choices[0].text
    replaced = adapted.send(LOAD, {"lora_name": "new", "lora_path": "a", "load_inplace": True})
    assert replaced.status == 200
    assert complete(adapted, "new") == of_a
    done = adapted.send(UNLOAD, {"lora_name": "new"})
    assert done[:2] == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert adapted.send(COMPLETE, {"prompt": "a", "model": "new"}).status == 404
    assert adapted.send(UNLOAD, {"lora_name": "new"}).status == 404
    assert adapted.state.llm.engine.scheduler.running  # it has the unloaded adapter
    rest = list(stream)
    assert (text + "".join(chunk.choices[0].text for chunk in rest)).startswith(of_b)
    assert rest[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_path": "../outside"}, 400, "outside the server's lora_directory"),
        ({"lora_path": "link"}, 400, "outside"),
        ({"lora_path": "inner"}, 400, "outside the directory"),
        ({"lora_path": "waits"}, 400, "not a regular file"),
        ({"lora_path": "loop"}, 404, "is not a directory"),
        ({"lora_path": "a\0"}, 404, "is not a directory"),
        ({"lora_path": "a" * 5000}, 404, "is not a directory"),
        ({"lora_path": "."}, 400, "has no adapter_config.json"),
        ({"lora_name": "model"}, 400, "conflicts with a served base model"),
        ({"lora_name": demo_model.MODEL}, 400, "conflicts with a served base model"),
        ({"lora_name": "\n"}, 400, "lora_name must be"),
        ({"is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
    ],
)
def test_bad_adapters_are_refused(
    adapted: Running, body: dict[str, Any], status: int, message: str
) -> None:
    reply = adapted.send(LOAD, {"lora_name": "bad", "lora_path": "a", **body})
    assert reply.status == status
    assert message in reply.error["message"]
    assert adapted.state.adapters.by_name.keys() == {"first"}


def test_many_clients_at_once(adapted: Running) -> None:
    """Each name is somebody's; ids are used again, so that nothing grows."""

    def load_and_unload(number: int) -> list[int]:
        name = {"lora_name": f"n{number % 3}"}
        found = adapted.send(LOAD, {**name, "lora_path": "ab"[number % 2]}).status
        answer = adapted.send(
            COMPLETE, {"prompt": "a", "max_tokens": 1, "model": name["lora_name"]}
        )
        return [found, answer.status, adapted.send(UNLOAD, name).status]

    with ThreadPoolExecutor(8) as pool:
        loads, answers, unloads = zip(*pool.map(load_and_unload, range(30)), strict=True)
    assert {*loads} <= {200, 400}
    assert {*answers} | {*unloads} <= {200, 404}
    assert loads.count(200) == unloads.count(200)
    assert adapted.state.adapters.by_name.keys() == {"first"}
    registry: AdapterRegistry = adapted.state.llm.engine.input_processor.find_adapter.__self__
    assert len(registry._known) <= 16


def test_many_adapters(adapted: Running) -> None:
    for number in range(40):
        assert adapted.send(LOAD, {"lora_name": str(number), "lora_path": "b"}).status == 200
    assert len(adapted.send("/v1/models").body["data"]) == 42
    unknown = adapted.send(COMPLETE, {"prompt": "a", "model": "x"})
    assert unknown.error["message"].endswith("'5', and 34 more")
    for number in range(40):
        assert adapted.send(UNLOAD, {"lora_name": str(number)}).status == 200
    assert complete(adapted, "first") != complete(adapted, "model")


@pytest.mark.of_engines
def test_without_the_option_nothing_is_loaded(server: Running, home: Path) -> None:
    for path, body in ((LOAD, {"lora_name": "a", "lora_path": str(home / "a")}), (UNLOAD, {})):
        reply = server.send(path, {"lora_name": "a", **body})
        assert (reply.status, reply.error["code"]) == (403, "not_allowed")
