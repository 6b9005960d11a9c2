"""The shipped model behind Ray Serve: two replicas in the cluster of this folder, real HTTP.

Starting Serve takes half a minute, so these tests run when asked for: see CONTRIBUTING.md.
"""

import json
import os
import re
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

if "RAY_SERVE" not in os.environ:
    pytest.skip("RAY_SERVE=1 runs them", allow_module_level=True)
pytest.importorskip("ray")
pytest.importorskip("fastapi")

import openai
import ray
from openai import OpenAI
from ray import serve

from nanovllm import demo_model
from nanovllm.apps.ray import deployment

KEY = "a-key"
LONG: dict[str, Any] = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
"""A request that runs for seconds."""


class Service(NamedTuple):
    """An application that runs."""

    url: str
    client: OpenAI

    def metrics(self) -> str:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"X-API-Key": KEY})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())

    def values(self, name: str, *labels: str) -> dict[str, float]:
        """Return a metric's value of each replica."""
        found = {}
        for line in self.metrics().splitlines():
            if line.startswith(f"{name}{{") and all(label in line for label in labels):
                replica = re.search(r'replica="(\w+)"', line)
                assert replica is not None
                found[replica[1]] = float(line.rpartition(" ")[2])
        return found

    def ask(self, *texts: str, **options: Any) -> Any:
        """Send a conversation, the user's turns and the model's in turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        options = {"max_tokens": 4, **options}
        return self.client.chat.completions.create(model="model", messages=messages, **options)


_running: list[Service] = []
"""The application, from the first test that needs it to the last test of this file."""


@pytest.fixture
def service(ray_cluster: Any) -> Service:
    """Two replicas that take four requests each, and a queue of four more."""
    if not _running:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        serve.start(proxy_location="HeadOnly", http_options={"port": port})
        application = deployment(
            demo_model.MODEL,
            num_replicas=2,
            max_ongoing_requests=4,
            max_queued_requests=4,
            ray_actor_options={"num_cpus": 1},
            max_model_len=1024,
            num_kvcache_blocks=512,
            kvcache_block_size=16,
            api_keys=[KEY],
        )
        serve.run(application, route_prefix="/llm")
        url = f"http://127.0.0.1:{port}/llm"
        client = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=30)
        _running.append(Service(url, client))
    return _running[0]


@pytest.fixture(scope="module", autouse=True)
def _ended_at_last() -> Iterator[None]:
    yield
    if _running:
        _running.clear()
        serve.shutdown()


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_routes_are_the_servers(service: Service) -> None:
    whole = service.ask("Explain paged attention.", max_tokens=40, temperature=0)
    chunks = service.ask("Explain paged attention.", max_tokens=40, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert text.startswith("Paged attention keeps the KV cache in fixed-size blocks")
    options: dict[str, Any] = {"model": "model", "prompt": "A KV cache is", "max_tokens": 8}
    done = service.client.completions.create(**options, temperature=0)
    pieces = service.client.completions.create(**options, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == done.choices[0].text
    assert service.client.models.list().data[0].id == "model"
    with pytest.raises(openai.BadRequestError, match="temperature must be a finite number >= 0"):
        service.ask("A?", temperature=-1)
    with pytest.raises(openai.AuthenticationError):
        service.client.with_options(api_key="wrong").models.list()
    with urllib.request.urlopen(f"{service.url}/health", timeout=30) as answer:
        assert json.load(answer) == {"status": "ok"}
        assert len(answer.headers.get_all("x-request-id")) == 1


def test_turns_of_a_conversation_meet_their_prefix(service: Service) -> None:
    name = "vllm:request_success_total"
    before = Counter(service.values(name, 'finished_reason="length"'))
    for number in range(16):
        turns = [f"Question {number} of sixteen: what is a block table, and what is a page?"]
        first = service.ask(*turns)
        turns += [first.choices[0].message.content, "And then?"]
        second = service.ask(*turns).usage
        assert second.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16
        assert second.prompt_tokens_details.cached_tokens >= 16
    after = Counter(service.values(name, 'finished_reason="length"'))
    assert len(after) == 2
    assert min((after - before).values()) >= 2, "one replica has got all conversations"


def test_a_client_that_goes_away_ends_its_request(service: Service) -> None:
    aborted = sum(service.values("vllm:request_success_total", '"abort"').values())
    with service.ask("Go on.", stream=True, **LONG) as stream:
        next(iter(stream))
        until(lambda: sum(service.values("vllm:num_requests_running").values()) == 1)
    until(lambda: sum(service.values("vllm:num_requests_running").values()) == 0, seconds=2)
    until(lambda: sum(service.values("vllm:request_success_total", '"abort"').values()) > aborted)


def test_a_full_queue_is_refused(service: Service) -> None:
    def send(number: int) -> Any:
        try:
            return service.ask(f"Number {number}.", **{**LONG, "max_tokens": 200})
        except openai.InternalServerError as error:
            return error

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(send, range(20)))
    errors = [item for item in found if isinstance(item, openai.InternalServerError)]
    assert 1 <= len(errors) <= 12, (
        "eight run; four wait, or are refused before any replica is known busy"
    )
    for error in errors:
        assert (error.status_code, error.code) == (503, "queue_full")
        assert error.response.headers["retry-after"] == "1"


def test_a_replica_that_dies(service: Service) -> None:
    """A stream ends with an error, a whole answer comes from another replica; then all is well."""
    session = {"X-Session-Id": "one"}  # both go to one replica
    with ThreadPoolExecutor(1) as pool:
        stream = service.ask("Go on.", stream=True, extra_headers=session, **LONG)
        next(iter(stream))
        running = service.values("vllm:num_requests_running")
        whole = pool.submit(
            service.ask, "And you.", extra_headers=session, **{**LONG, "max_tokens": 500}
        )
        until(lambda: max(service.values("vllm:num_requests_running").values()) == 2)
        kill_replica(max(running, key=lambda name: running[name]))
        with pytest.raises(openai.APIError, match="the replica that worked on the request has die"):
            list(stream)
        assert whole.result().usage.completion_tokens == 500
    for number in range(4):
        assert service.ask(f"{number}?").usage.completion_tokens


def kill_replica(name: str) -> None:
    """Kill the process of a replica."""
    actor = ray.get_actor(f"SERVE_REPLICA::default#EngineReplica#{name}", namespace="serve")
    ray.kill(actor, no_restart=True)
