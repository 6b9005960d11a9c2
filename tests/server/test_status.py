"""The page at / and its numbers."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from nanovllm import AsyncLLM, __version__, demo_model
from nanovllm.server import metrics, status
from nanovllm.server.metrics import ServerMetrics
from tests.glossary import GREEDY, OPTIONS, QUESTION


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    llm = AsyncLLM(demo_model.MODEL, **OPTIONS)
    app = FastAPI()
    app.state.server = SimpleNamespace(
        llm=llm, model_name="tiny", metrics=ServerMetrics("tiny", llm)
    )
    app.include_router(status.router)
    app.include_router(metrics.router)
    yield app
    llm.shutdown()


async def get(app: FastAPI, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(path)


class Page(HTMLParser):
    """Reads what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: set[str] = set()
        self.labels: set[str | None] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self.ids.add(attributes.get("id") or "")
        if tag == "label":
            self.labels.add(attributes.get("for"))


@pytest.fixture(scope="module")
def page(app: FastAPI) -> httpx.Response:
    return asyncio.run(get(app, "/"))


def test_the_page_refers_to_nothing_outside(page: httpx.Response) -> None:
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    addresses = set(re.findall(r"\b\w+://[^\s\"'`]*", page.text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of a kind of element"
    found = Page(page.text)
    for tag, attributes in found.tags:
        assert not attributes.keys() & {"src", "href", "action", "srcdoc", "style"}, tag
        assert not any(name.startswith("on") for name in attributes), "code in an attribute"
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
    assert not re.search(r"url\(|@import|\bimport\b|importScripts|eval\(|Function\(", page.text)


def test_text_from_the_server_is_never_read_as_html(page: httpx.Response) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|srcdoc", page.text)


def test_the_key_is_stored_nowhere(page: httpx.Response) -> None:
    assert not re.search(r"localStorage|sessionStorage|cookie|indexedDB", page.text)


def test_the_policy_allows_the_page_and_nothing_else(page: httpx.Response) -> None:
    policy = dict(
        rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page.text, re.DOTALL)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    for rule in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[rule] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_every_control_has_a_label_and_every_id_exists(page: httpx.Response) -> None:
    found = Page(page.text)
    for tag, attributes in found.tags:
        if tag in ("input", "textarea"):
            assert attributes["id"] in found.labels
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in found.ids
    used = set(re.findall(r'byId\("([\w-]+)"\)', page.text))
    assert used <= found.ids
    assert ("html", {"lang": "en"}) in found.tags


def test_numbers_are_those_of_the_requests(app: FastAPI) -> None:
    server: Any = app.state.server

    async def run() -> None:
        before = (await get(app, "/status.json")).json()
        with server.metrics.meter(GREEDY) as meter:
            output = await server.llm.generate(QUESTION, GREEDY)
            meter.observe(output)
        server.metrics.refused("queue_full")
        after = (await get(app, "/status.json")).json()
        assert after["model"] == "tiny"
        assert after["version"] == __version__
        assert after["uptime"] > before["uptime"] > 0
        assert after["output_tokens"] - before["output_tokens"] == len(output.token_ids)
        num_prompt_tokens = len(output.prompt_token_ids)
        assert after["prompt_tokens"] - before["prompt_tokens"] == num_prompt_tokens
        assert after["requests"]["stop"] - before["requests"]["stop"] == 1
        assert after["refused"] == {"queue_full": 1}
        assert after["first_tokens"]["count"] == before["first_tokens"]["count"] + 1
        assert after["running"] == after["waiting"] == after["kv_cache_usage"] == 0
        assert after["kv_cache_tokens"] == 2048 * server.llm.engine.cache_info.block_size
        assert after["mean_acceptance_length"] is None, "there is no speculation"

    asyncio.run(run())


def test_the_page_reads_what_the_server_sends(app: FastAPI, page: httpx.Response) -> None:
    """Each field that the page reads of a status is in the JSON."""
    sent = asyncio.run(get(app, "/status.json")).json()
    read = set(re.findall(r"\b(?:s|status|last)\.([a-z_]+)\b", page.text)) - {"json"}
    read |= set(re.findall(r'perSecond\(s, "(\w+)"\)', page.text))
    assert read <= sent.keys()
    assert len(read) > 10


def test_metrics_route(app: FastAPI) -> None:
    answer = asyncio.run(get(app, "/metrics"))
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in answer.text
