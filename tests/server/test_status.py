"""The page at / and its numbers."""

import re
import time
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest

from nanovllm import AsyncLLM, __version__
from tests.glossary import QUESTION
from tests.server.conftest import Reply, Running, running

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 160,
}
COMPLETIONS: dict[str, Any] = {"prompt": [QUESTION, "Hello"], "max_tokens": 3}


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
def page(server: Running) -> Reply:
    return server.send("/")


def test_the_page_refers_to_nothing_outside(page: Reply) -> None:
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"\b\w+://", page.body)
    found = Page(page.body)
    for tag, attributes in found.tags:
        assert not attributes.keys() & {"src", "href", "action", "srcdoc", "style"}, tag
        assert not any(name.startswith("on") for name in attributes), "code in an attribute"
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
    assert not re.search(r"url\(|@import|\bimport\b|importScripts|eval\(|Function\(", page.body)


def test_text_from_the_server_is_never_read_as_html(page: Reply) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|srcdoc", page.body)


def test_the_key_is_stored_nowhere(page: Reply) -> None:
    assert not re.search(r"localStorage|sessionStorage|cookie|indexedDB", page.body)


def test_the_policy_allows_the_page_and_nothing_else(page: Reply) -> None:
    policy = dict(
        rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page.body, re.DOTALL)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    for rule in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[rule] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_every_control_has_a_label_and_every_id_exists(page: Reply) -> None:
    found = Page(page.body)
    for tag, attributes in found.tags:
        if tag in ("input", "textarea"):
            assert attributes["id"] in found.labels
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in found.ids
    used = set(re.findall(r'byId\("([\w-]+)"\)', page.body))
    assert used <= found.ids
    assert ("html", {"lang": "en"}) in found.tags


def test_numbers_are_those_of_the_requests(server: Running) -> None:
    before = server.send("/status.json").body
    usage = server.send("/v1/chat/completions", CHAT).body["usage"]
    after = server.send("/status.json").body
    assert after["model"] == server.state.model_name
    assert after["version"] == __version__
    assert after["uptime"] > before["uptime"] > 0
    assert after["output_tokens"] - before["output_tokens"] == usage["completion_tokens"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"]
    assert after["requests"]["stop"] - before["requests"]["stop"] == 1
    assert after["first_tokens"]["count"] == before["first_tokens"]["count"] + 1
    assert after["running"] == after["waiting"] == after["kv_cache_usage"] == 0
    assert after["kv_cache_tokens"] == 2048 * server.state.llm.engine.worker_info.block_size
    assert after["mean_acceptance_length"] is None, "there is no speculation"


def test_the_page_reads_what_the_server_sends(server: Running, page: Reply) -> None:
    """Each field that the page reads of a status is in the JSON."""
    sent = server.send("/status.json").body
    read = set(re.findall(r"\b(?:s|status|last)\.([a-z_]+)\b", page.body)) - {"json"}
    assert read <= sent.keys()
    assert len(read) > 10


def test_the_page_needs_no_key_and_its_numbers_do(async_llm: AsyncLLM) -> None:
    with running(async_llm, api_keys=("the-key",)) as server:
        assert server.send("/").status == 200
        for path in ("/status.json", "/metrics"):
            assert server.send(path).status == 401
            assert server.send(path, Authorization="Bearer the-key").status == 200
        assert "the-key" not in server.send("/").body


def test_a_request_in_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """With what the engine did for it, and nothing of what it said."""
    with caplog.at_level("INFO", "nanovllm.apps.server"):
        answer = server.send("/v1/chat/completions", CHAT, X_Request_Id="my-id")
        other = server.send("/v1/completions", COMPLETIONS)
        stream = server.send("/v1/chat/completions", {**CHAT, "stream": True})
        deadline = time.monotonic() + 5  # the line of a stream comes after its last byte
        while len(caplog.records) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert answer.headers["x-request-id"] == "my-id"
    assert stream.status == 200
    first, second, third = (vars(record)["request"] for record in caplog.records)
    usage = answer.body["usage"]
    assert first["id"] == "my-id"
    assert first["path"] == "/v1/chat/completions"
    used = (usage, other.body["usage"], usage)
    for fields, usage in zip((first, second, third), used, strict=True):
        assert fields["status"] == 200
        assert fields["prompt_tokens"] == usage["prompt_tokens"]
        assert fields["output_tokens"] == usage["completion_tokens"]
        assert 0 < fields["ttft"] < fields["duration"]
    assert (first["finish"], second["finish"], third["finish"]) == ("stop", "length", "stop")
    assert QUESTION not in caplog.text
    assert "paged attention" not in caplog.text.lower()


def test_metrics_of_the_server(async_llm: AsyncLLM) -> None:
    """The queue holds one sequence, so two answers are too many."""
    with running(async_llm, max_waiting=1) as server:
        assert server.send("/v1/completions", {**COMPLETIONS, "n": 2}).status == 400
        assert server.send("/v1/completions", {"max_tokens": -1, "prompt": "x"}).status == 400
        assert server.send("/v1/chat/completions", CHAT).status == 200
        assert server.send("/nowhere").status == 404
        time.sleep(0.3)  # for the event loop to be watched
        answer = server.send("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    name = server.state.model_name

    def value(sample: str, **labels: str) -> float:
        words = ",".join(f'{k}="{v}"' for k, v in sorted({"model_name": name, **labels}.items()))
        (line,) = (x for x in answer.body.splitlines() if x.startswith(f"{sample}{{{words}}} "))
        return float(line.split()[-1])

    assert value("vllm:num_requests_running", engine="0") == 0
    assert value("vllm:request_success_total", engine="0", finished_reason="stop") == 1
    assert value("vllm:request_success_total", engine="0", finished_reason="abort") == 0
    assert value("nanovllm:refused_requests_total", reason="too_many_sequences") == 1
    count = "nanovllm:http_requests_total"
    assert value(count, path="/v1/completions", status="400") == 2
    assert value(count, path="/v1/chat/completions", status="200") == 1
    assert value(count, path="other", status="404") == 1
    assert value("nanovllm:event_loop_lag_seconds_count", engine="0") > 0
