"""Pictures through the server: the routes of OpenAI and Anthropic, by their own clients."""

import base64
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from anthropic import Anthropic
from PIL import Image

from nanovllm import LLM, AsyncLLM
from tests.server.conftest import Running, running
from tests.vision.conftest import FEW
from tests.vision.pictures import noise
from tests.vision.qwen import PAD
from tests.vision.test_doors import png

FILE = png(noise(24, 40, 5))
BASE64 = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{BASE64}"
QUESTION = "What is it?"
PARTS = [
    {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
    {"type": "text", "text": QUESTION},
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def server(
    qwen: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    media = tmp_path_factory.mktemp("media")
    (media / "a.png").write_bytes(FILE)
    (media / "link.png").symlink_to("/etc/hostname")
    (media / "loop.png").symlink_to(media / "loop.png")
    llm = AsyncLLM(str(qwen("qwen3_vl")), dtype="bfloat16", **FEW)
    with running(llm, allowed_local_media_path=str(media)) as found:
        yield found
    llm.shutdown()


@pytest.fixture(scope="module")
def expected(qwen: Callable[[str], Path], llm: LLM) -> tuple[str, int]:
    """The answer, and the number of the prompt's tokens."""
    params = llm.get_default_sampling_params().clone(**GREEDY)
    (output,) = llm.chat([{"role": "user", "content": PARTS}], params, use_tqdm=False)
    return output.outputs[0].text, len(output.prompt_token_ids)


def test_chat(server: Running, expected: tuple[str, int]) -> None:
    """Whole and streamed; usage, /tokenize and files in their directory count the picture."""
    text, num_tokens = expected
    client = server.client()
    messages: Any = [{"role": "user", "content": PARTS}]
    model = server.state.model_name
    answer = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    assert answer.choices[0].message.content == text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_tokens
    chunks = client.chat.completions.create(model=model, messages=messages, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    reply = server.send("/tokenize", {"messages": messages})
    assert reply.body["count"] == num_tokens
    engine: Any = server.state.llm.engine
    before = engine.scheduler.hooks[-1].num_encoded
    messages += [answer.choices[0].message, {"role": "user", "content": "Why?"}]
    more = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    assert more.usage is not None
    assert more.usage.prompt_tokens > num_tokens + 6
    assert engine.scheduler.hooks[-1].num_encoded == before  # a second turn encodes nothing
    local = [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}, PARTS[1]]}]
    answer = client.chat.completions.create(model=model, messages=local, **GREEDY)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == text


def test_responses(server: Running, expected: tuple[str, int]) -> None:
    """Also of tools that return pictures."""
    client = server.client()
    parts = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    items: Any = [{"role": "user", "content": parts}]
    model = server.state.model_name
    options: Any = {"model": model, "temperature": 0, "max_output_tokens": 6}
    found = client.responses.create(input=items, **options)
    assert found.output_text == expected[0]
    assert found.usage is not None
    assert found.usage.input_tokens == expected[1]
    long = base64.b64encode(png(noise(8, 704))).decode()
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{long}"}
    counts = []
    for detail in ("high", "low"):
        content: Any = [{**part, "detail": detail}]
        small = client.responses.create(input=[{"role": "user", "content": content}], **options)
        assert small.usage is not None
        counts.append(small.usage.input_tokens)
    assert counts[0] - counts[1] == 88 - 64
    items += [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": parts[:1]},
    ]
    more = client.responses.create(input=items, **options)
    assert more.usage is not None
    assert more.usage.input_tokens >= expected[1] + 15


def test_messages(server: Running, expected: tuple[str, int]) -> None:
    client = Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    picture: Any = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    model = server.state.model_name
    content: Any = [picture, {"type": "text", "text": QUESTION}]
    messages: Any = [{"role": "user", "content": content}]
    options: Any = {"model": model, "max_tokens": 6, "messages": messages}
    options["extra_body"] = {"temperature": 0}
    found = client.messages.create(**options)
    assert found.content[0].text == expected[0]  # type: ignore[union-attr]
    usage = found.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected[1]
    assert client.messages.count_tokens(model=model, messages=messages).input_tokens == expected[1]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [picture]}
    messages += [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
        },
        {"role": "user", "content": [result]},
    ]
    more = client.messages.count_tokens(model=model, messages=messages)
    assert more.input_tokens >= expected[1] + 15


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9/x.png", "nothing is fetched"),
        ("../a.png", "outside allowed_local_media_path"),
        ("file:///etc/hostname", "outside allowed_local_media_path"),
        ("none.png", "there is no file"),
        ("link.png", "outside allowed_local_media_path"),
        ("loop.png", "is no path"),
        ("file:%2e%2e/a.png", "outside allowed_local_media_path"),
        ("x" * 10**5, "File name too long$"),
        (f"data:image/png;base64,{BASE64[:60]}", "it is damaged"),
    ],
)
def test_bad_pictures_are_the_fault_of_a_message(server: Running, url: str, words: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    reply = server.send(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
    )
    assert reply.status == 400
    assert re.search(words, reply.error["message"])
    assert reply.error["param"] in ("messages", "messages[0]")


def test_nothing_else_waits_for_large_pictures(server: Running) -> None:
    """Nor does a small one for all that another request has."""
    large = base64.b64encode(png(Image.new("L", (2500, 2500)))).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{large}"}}] * 2
    ended: list[str] = []

    def ask(name: str, content: Any) -> None:
        messages = [{"role": "user", "content": content}]
        reply = server.send("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert reply.status == 200
        ended.append(name)

    threads = [threading.Thread(target=ask, args=("large", parts)) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not server.state.opening._jobs:  # two wait for the first
        time.sleep(0.01)
    threads += [threading.Thread(target=ask, args=("small", PARTS))]
    threads[-1].start()
    ask("text", "What?")
    assert ended == ["text"]
    for thread in threads:
        thread.join()
    assert ended.index("small") < 3


def test_a_completion_has_no_picture(server: Running) -> None:
    reply = server.send("/v1/completions", {"prompt": PAD, "max_tokens": 2})
    assert reply.status == 200
