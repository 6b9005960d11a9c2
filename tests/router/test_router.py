"""Two models behind one address, of which memory holds one: each engine is a real process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from openai import OpenAI

from nanovllm import demo_model
from tests.helpers import environment, wait_until

pytestmark = pytest.mark.long
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
KEY = "sk-test,with-a-comma"


class Router:
    """A server of several models, and its log."""

    def __init__(self, tables: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "nanovllm", "serve", str(tables), "--port", "0", *flags]
        self.process = subprocess.Popen(
            [*command, "--api-key", KEY],
            env=environment(),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: any(" at http://" in line for line in self.log), 60)
        line = next(line for line in self.log if " at http://" in line)
        url = line.partition(" at ")[2].partition(",")[0]
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)
        self.openai = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    def _read(self) -> None:
        self.log.extend(iter(self.process.stderr.readline, ""))

    def ask(self, model: str, **options: Any) -> httpx.Response:
        body = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 0, **options}
        return self.http.post("/v1/chat/completions", json=body)

    def states(self) -> dict[str, str]:
        return {card.id: card.state for card in self.openai.models.list()}

    def engines(self) -> dict[str, int]:
        """Return the process of each model's engine."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = path.read_bytes().split(b"\0") if path.exists() else []
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            for word in words:
                if word.startswith(b"--served-model-name=") and int(parent) == self.process.pid:
                    name = word.partition(b"=")[2].decode().partition(",")[0]
                    found[name] = int(path.parent.name)
        return found


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    model = json.dumps(demo_model.MODEL)
    options = "gpu_memory_utilization = 0.6\nmax_model_len = 512\nnum_kvcache_blocks = 256"
    tables = tmp_path_factory.mktemp("router") / "models.toml"
    tables.write_text(
        f'[a]\nmodel = {model}\naliases = ["gpt-4"]\n{options}\n'
        f"[b]\nmodel = {model}\n{options}\n"
        f'[lost]\nmodel = "/no/where"\n'
    )
    found = Router(tables)
    yield found
    found.process.send_signal(signal.SIGTERM)
    assert found.process.wait(60) == 0
    assert found.engines() == {}


def test_models_come_when_they_are_asked_for_and_make_room(router: Router) -> None:
    assert router.states() == dict.fromkeys(("a", "gpt-4", "b", "lost"), "unloaded")
    assert "/v1/responses" in router.http.get("/openapi.json").json()["paths"]
    assert router.states() == dict.fromkeys(("a", "gpt-4", "b", "lost"), "unloaded")
    answer = router.ask("gpt-4").json()
    assert answer["model"] == "gpt-4"
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith("The KV cache")
    assert router.ask("b").json()["choices"][0]["message"]["content"] == text
    assert router.states() == {
        "a": "sleeping",
        "gpt-4": "sleeping",
        "b": "loaded",
        "lost": "unloaded",
    }
    engines = router.engines()
    stream = router.openai.chat.completions.create(
        model="a",
        messages=QUESTION,
        max_tokens=8,
        temperature=0,
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    assert router.states()["b"] == "sleeping"
    assert router.engines() == engines  # the same process woke up


def test_requests_for_both_take_turns(router: Router) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda name=name: answers.append(router.ask(name).status_code))
        for name in "abababab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 8


def test_a_model_that_cannot_be_loaded_says_why(router: Router) -> None:
    answer = router.ask("lost")
    assert answer.status_code == 500
    error = answer.json()["error"]
    reason = "model directory '/no/where' does not exist"
    assert error["message"] == f"the model 'lost' cannot be loaded: {reason}"
    assert error["code"] == "model_load_failed"
    cards = {card["id"]: card for card in router.http.get("/v1/models").json()["data"]}
    assert cards["lost"]["error"] == reason


def test_errors_before_an_engine_is_asked(router: Router) -> None:
    assert router.ask("none").status_code == 404
    assert "this server has 'a', 'gpt-4', 'b'" in router.ask("none").json()["error"]["message"]
    assert router.http.get("/v1/models", headers={"Authorization": "no"}).status_code == 401
    assert router.http.post("/sleep").status_code == 404
    assert router.http.get("/no").status_code == 404
    for odd in ("%0a", "%00", "..", "%2e%2e", "a%20b", "%25", "%ff"):
        assert router.http.get(f"/v1/responses/{odd}").status_code == 404
    body = b'{"model": "a", "model": "b"}'
    json_type = {"Content-Type": "application/json"}
    assert router.http.post("/v1/completions", content=body, headers=json_type).status_code == 400
    assert router.http.post("/v1/completions", content=body).status_code == 415
    assert router.ask(3).status_code == 400
    answers = (router.ask("a"), router.ask("none"))
    for name in ("date", "x-request-id"):
        assert [len(answer.headers.get_list(name)) for answer in answers] == [1, 1]
    anthropic = router.http.post("/v1/messages", json={"model": "none"}).json()
    assert anthropic["type"] == "error"


def test_what_all_have_together(router: Router) -> None:
    router.ask("a")
    text = router.http.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model="a",model_name="a"} 0.0' in text
    assert 'nanovllm:model_state{model="a",state="loaded"} 1.0' in text
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert router.http.get("/v1/models/none").status_code == 404
    text = router.http.get("/metrics").text
    assert text.count("# TYPE nanovllm:http_requests_total counter") == 1
    assert 'http_requests_total{model="",path="/v1/models/{name:path}",status="404"}' in text
    assert router.http.get("/v1/models/gpt-4").json()["max_model_len"] == 512
    assert router.http.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}
    for path in ("/", "/page/app.js"):
        assert router.http.get(path).status_code == 200


def test_a_client_that_goes_away_ends_its_request(router: Router) -> None:
    body = {"model": "a", "messages": QUESTION, "ignore_eos": True, "stream": True}
    body["max_tokens"] = body["min_tokens"] = 400
    with router.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    running = 'vllm:num_requests_running{engine="0",model="a",model_name="a"} '
    wait_until(lambda: f"{running}0.0" in router.http.get("/metrics").text, 10)
    wait_until(lambda: router.http.get("/v1/models/a").json()["requests"] == 0, 10)


def test_an_engine_that_dies_is_started_again(router: Router) -> None:
    body = {"model": "a", "messages": QUESTION, "ignore_eos": True, "stream": True}
    body["max_tokens"] = body["min_tokens"] = 400
    router.ask("a")
    time.sleep(0.1)
    lines = []
    with router.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not lines:
                os.kill(router.engines()["a"], signal.SIGKILL)
            lines.append(line)
    assert json.loads(lines[-4].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert lines[-2] == "data: [DONE]"
    wait_until(lambda: router.ask("a").status_code == 200, 60)  # some may still reach the dead one
    assert "model_deaths_total" in router.http.get("/metrics").text
