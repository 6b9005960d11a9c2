"""The bounded queue, deadlines and clients that go away: nothing stays behind in the engine."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from nanovllm import AsyncLLM
from nanovllm.apps.server import generation
from nanovllm.apps.server.admission import AdmissionControl, BodyBudget, Guard
from nanovllm.apps.server.error_bodies import APIError
from tests.helpers import wait_until
from tests.server.conftest import Running, running

ENDLESS: dict[str, Any] = {"prompt": [1], "max_tokens": 1000, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("idle_afterwards")


class Ended(Guard):
    """A request of `AdmissionControl` that notes how it was ended."""

    def __init__(self) -> None:
        self.errors: list[APIError] = []
        self.is_cut = False

    def end(self, error: APIError) -> None:
        self.errors.append(error)

    def cut(self) -> None:
        self.is_cut = True


def test_admission_counts_what_waits() -> None:
    num_running = 0
    admission = AdmissionControl(3, lambda: num_running)
    first, second, third = Ended(), Ended(), Ended()
    with admission.admit(first, 2), admission.admit(second, 1):
        assert (admission.num_active, admission.num_waiting) == (3, 3)
        with pytest.raises(APIError) as refused, admission.admit(third, 1):
            pass
    assert refused.value.status_code == 503
    assert int(refused.value.headers["Retry-After"]) >= 1
    assert admission.num_active == 0
    num_running = 2
    with admission.admit(first, 2), admission.admit(second, 3):
        assert (admission.num_active, admission.num_waiting) == (5, 3)
        error = APIError(503, "the end")
        admission.end_all(error)
        assert first.errors == second.errors == [error]


@pytest.fixture(scope="module")
def small(front: str, async_llm: AsyncLLM) -> Iterator[Running]:
    """A server with a short queue and a short deadline."""
    with running(async_llm, max_waiting=4, request_timeout=0.3) as found:
        yield found


def test_bodies_share_a_budget(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: many large bodies at once took all memory, each of an allowed size."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(2**16 + 60)}

    async def read_all() -> None:
        budget = BodyBudget(1)
        with budget.reading(receive) as first, budget.reading(receive) as second:
            await first()
            with pytest.raises(APIError) as refused:
                await second()
            assert refused.value.status_code == 503
        with budget.reading(receive) as third:
            await third()

    asyncio.run(read_all())
    monkeypatch.setattr(small.state.bodies, "_max_bytes", 1000)
    body = {"prompt": "a", "max_tokens": 1}
    large = json.dumps(body).encode() + b" " * 2**17
    assert small.send("/v1/completions", large).error["code"] == "bodies_full"
    assert small.send("/v1/completions", body).status == 200


def test_the_queue_comes_before_all_work(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with a full queue, conversations were rendered and texts tokenized all the same."""
    processor = small.state.llm.engine.input_processor
    work: list[str] = []
    for owner, name in ((processor.chat, "render"), (processor, "encode")):
        monkeypatch.setattr(owner, name, lambda *args, name=name, **_: work.append(name))
    monkeypatch.setattr(small.state.admission, "_num_running", lambda: 0)
    messages = [{"role": "user", "content": "a"}]
    with small.state.admission.admit(Ended(), 4):
        for path, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"messages": messages}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            assert small.send(path, body).error["code"] == "queue_full", path
    assert work == []


BROKEN: list[dict[str, Any]] = [
    {"priority": -1},
    {"temperature": -1},
    {"stop_token_ids": [10**9]},
    {"cache_salt": "a" * 129},
    {"guided_regex": "a", "guided_choice": ["a"]},
    {"model": "another"},
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: "-".join(broken))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/completions"])
def test_cheap_checks_come_before_all_work(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, broken: dict[str, Any]
) -> None:
    """Symptom: a priority that is not allowed was refused after the conversation was rendered."""
    processor = server.state.llm.engine.input_processor
    work: list[str] = []
    for owner, name in ((processor.chat, "render"), (processor, "encode")):
        monkeypatch.setattr(owner, name, lambda *args, name=name, **_: work.append(name))
    monkeypatch.setattr(processor.grammars, "compile", lambda params: work.append("compile"))
    form = {"guided_regex": "a"}
    inputs = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
        "/v1/completions": {"prompt": "a"},
    }
    reply = server.send(path, inputs[path] | form | broken)
    assert reply.status in (400, 404)
    assert reply.error["param"] in broken
    assert work == []


def test_a_heavy_grammar_stalls_nobody_else(
    front: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the one thread that tokenizes compiled grammars, too."""
    grammars: Any = server.state.llm.engine.input_processor.grammars
    compile_grammar, may_go_on = grammars.compile, threading.Event()

    def compile_slowly(params: Any) -> Any:
        may_go_on.wait(30)
        return compile_grammar(params)

    monkeypatch.setattr(grammars, "compile", compile_slowly)
    monkeypatch.setattr(generation, "_COMPILE_SECONDS", 0.5)
    text = f"heavy {front}"  # the engine keeps grammars that it has compiled
    heavy = {"prompt": "a", "max_tokens": 20, "guided_regex": text}
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(server.send, "/v1/completions", heavy)
        assert server.send("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
        assert not late.done()
        assert late.result().error["code"] == "grammar_timeout"
    may_go_on.set()
    answer = server.send("/v1/completions", heavy)
    assert answer.body["choices"][0]["text"] == text


def test_users_take_turns_while_conversations_are_rendered(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the long conversations of one user held up another user's short one."""
    processor, may_go_on = server.state.llm.engine.input_processor, threading.Event()
    render, rendered = processor.chat.render, []

    def render_slowly(messages: Any, options: Any, locate: Any) -> Any:
        rendered.append(messages[0].content)
        may_go_on.wait(20)
        return render(messages, options, locate)

    monkeypatch.setattr(processor.chat, "render", render_slowly)

    def ask(name: str) -> int:
        body = {"messages": [{"role": "user", "content": name}], "max_tokens": 1, "user": name[0]}
        return server.send("/v1/chat/completions", body).status

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, f"a{number}") for number in range(6)]
        wait_until(lambda: server.state.admission.num_active == 6, 10)
        answers.append(pool.submit(ask, "b"))
        wait_until(lambda: server.state.admission.num_active == 7, 10)
        may_go_on.set()
        assert [answer.result() for answer in answers] == [200] * 7
    assert "b" in rendered[2:4]  # two threads were busy


def test_a_user_holds_half_of_the_queue() -> None:
    """Symptom: one request with n=128 for 16 prompts kept everybody else out."""
    num_running = 0
    admission = AdmissionControl(4, lambda: num_running)

    def refusal(count: int, user: str | None) -> int | None:
        try:
            with admission.admit(Ended(), count, user):
                return None
        except APIError as error:
            return error.status_code

    assert refusal(3, "a") == 400
    assert refusal(4, None) is None
    with admission.admit(Ended(), 2, "a"):
        assert refusal(1, "a") == 429
        with admission.admit(Ended(), 1, "b"):
            assert refusal(1, "b") is None
            assert refusal(2, "b") == 503
            num_running = 3  # nothing waits, so there is room for all
            assert refusal(2, "a") is None
    num_running = 0
    assert refusal(2, "a") is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_at_its_deadline(small: Running, stream: bool) -> None:
    client = small.client().completions

    def ask() -> None:
        found: Any = client.create(
            model="model",
            prompt=[1],
            max_tokens=1000,
            n=4,
            stream=stream,
            logprobs=20,
            extra_body={"ignore_eos": True},
        )
        for _ in found:
            pass

    begin = time.monotonic()
    with pytest.raises(openai.APIError, match="request_timeout") as caught:
        ask()
    assert time.monotonic() - begin < 5
    if not stream:
        assert isinstance(caught.value, openai.APIStatusError)
        assert caught.value.status_code == 504


@pytest.mark.parametrize(
    ("path", "stream"), [("/v1/completions", False), ("/v1/chat/completions", True)]
)
def test_a_client_that_goes_away_ends_its_request(server: Running, path: str, stream: bool) -> None:
    body = {**ENDLESS, "n": 8, "stream": stream, "max_tokens": 1000}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "a"}]
        del body["prompt"]
    connection = http.client.HTTPConnection(server.host, server.port)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    engine = server.state.llm.engine
    wait_until(lambda: not engine.is_finished(), 10)
    if stream:
        connection.getresponse().read(100)
    connection.close()
    begin = time.monotonic()
    while not engine.is_finished():
        time.sleep(0.005)
    assert time.monotonic() - begin < 0.5  # all 8 answers would take longer
    assert server.state.admission.num_active == 0


def test_drains_and_ends_what_takes_too_long(async_llm: AsyncLLM) -> None:
    """As at SIGTERM: a stream that is not done in time ends with an error event."""
    with running(async_llm, drain_seconds=0.3) as server:
        stream = server.client().completions.create(
            model="model",
            prompt=[1],
            max_tokens=1000,
            n=64,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        server.drain()
        wait_until(lambda: server.state.admission.is_draining, 10)
        for path in ("/ready", "/v1/completions"):
            body = {"prompt": "a"} if path != "/ready" else None
            assert server.send(path, body).error["code"] == "shutting_down"
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_whose_request_it_is(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`user` of the request; with several API keys the key, so that no client is many users."""
    users: list[str | None] = []
    make_request = async_llm.engine.input_processor.make_request

    def note(*args: Any, user: str | None = None, **options: Any) -> Any:
        users.append(user)
        return make_request(*args, user=user, **options)

    monkeypatch.setattr(async_llm.engine.input_processor, "make_request", note)
    body = {"prompt": "a", "max_tokens": 1, "user": "me"}
    with running(async_llm, api_keys=("one",)) as server:
        assert server.send("/v1/completions", body, X_API_Key="one").status == 200
    with running(async_llm, api_keys=("one", "two")) as server:
        for key in ("one", "one", "two"):
            assert server.send("/v1/completions", body, X_API_Key=key).status == 200
    assert users[0] == "me"
    assert users[1] == users[2] != users[3]
    assert {"one", "two", "me"}.isdisjoint(users[1:])
