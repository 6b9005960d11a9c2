"""`nanovllm serve` as a process: start, signals, sockets, and the death of the engine."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanovllm import AsyncLLM, demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.apps.server.server_options import ServerOptions, keys_of_environment
from nanovllm.errors import ConfigError
from tests.helpers import ROOT, environment

pytest.importorskip("fastapi")

from nanovllm.apps.server.app import make_app
from nanovllm.apps.server.serve import EngineServer, bound_socket

FLAGS = ["--num-kvcache-blocks", "64", "--max-model-len", "4096", "--enforce-eager"]
ENDLESS = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True}


class Process:
    """A server in a process, ready to answer."""

    def __init__(self, *flags: str, **variables: str) -> None:
        command = [sys.executable, "-m", "nanovllm", "serve", demo_model.MODEL, "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *FLAGS, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**variables),
            cwd=ROOT,
        )
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if "try: " in line or '"KV cache of' in line:
                break
        threading.Thread(target=self._read, daemon=True).start()
        found = re.search(r" at http://[0-9.]+(:\d+)", self.log)
        self.url = f"http://127.0.0.1{found[1]}" if found else ""

    def _read(self) -> None:
        self.lines += self.process.stderr

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def send(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


class Later(threading.Thread):
    """A request that is sent in a thread; it has begun when the thread has started."""

    def __init__(self, process: Process, body: Any) -> None:
        super().__init__()
        self._process, self._body = process, body
        self.status, self.answer = 0, {}
        self.start()
        time.sleep(0.3)

    def run(self) -> None:
        try:
            self.status, self.answer = self._process.send("/v1/completions", self._body)
        except OSError:
            self.status = -1


@contextmanager
def serving(*flags: str, **variables: str) -> Iterator[Process]:
    server = Process(*flags, **variables)
    try:
        assert server.process.poll() is None, server.log
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_a_variable_without_a_key_is_no_open_door() -> None:
    with pytest.raises(ConfigError, match="which has no key: set one, or unset it"):
        keys_of_environment({"NANOVLLM_API_KEY": ",,"})
    assert keys_of_environment({"NANOVLLM_API_KEY": ""}) == ()


def test_serves_and_drains(tmp_path: Path) -> None:
    """After SIGTERM a running request is finished, a new one refused, and the status is 0."""
    with serving("--host", "0.0.0.0", "--served-model-name", "mine") as server:
        assert "max_model_len 4096" in server.log
        assert "KV cache of" in server.log
        assert server.send("/ready") == (200, {"status": "ready"})
        assert server.send("/v1/models")[1]["data"][0]["id"] == "mine"
        later = Later(server, {**ENDLESS, "max_tokens": 2000})
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.send("/health")[0] == 200
        for path, body in (("/ready", None), ("/v1/completions", {"prompt": "a"})):
            status, answer = server.send(path, body)
            assert status == 503
            assert answer["error"]["code"] == "shutting_down"
        later.join()
        assert later.status == 200
        assert later.answer["usage"]["completion_tokens"] == 2000
        assert server.process.wait(20) == 0
        assert "WARNING: anyone who can reach 0.0.0.0" in server.log
        assert "Traceback" not in server.log


@pytest.mark.long
def test_the_log_of_a_start_as_json() -> None:
    """Every line, from the choices of the engine to the end; scrapes are not in it."""
    with serving("--log-format", "json") as server:
        for path in ("/health", "/v1/models"):
            assert server.send(path)[0] == 200
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            assert answer.status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    messages = [json.loads(line)["message"] for line in server.lines]
    for begin in ("loading ", "native CPU kernels", "attention backend: ", "KV cache of "):
        assert any(message.startswith(begin) for message in messages), messages
    assert [m for m in messages if m.startswith("GET")] == ["GET /v1/models 200"]
    assert messages[-1].startswith("finishing 0 requests")


@pytest.mark.long
def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    """On a Unix socket, which is removed; and the API keys are not in the log."""
    path = tmp_path / "server.sock"
    flags = ["--uds", str(path), "--api-key", "sesame", "--drain-seconds", "60"]
    with serving(*flags, NANOVLLM_API_KEY="other-key") as server:
        assert path.stat().st_mode & 0o777 == 0o600
        body = json.dumps({**ENDLESS, "n": 64}).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-API-Key: other-key\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            connection.sendall(body)
            time.sleep(0.3)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(2) == 128 + signal.SIGINT
        assert not path.exists()
        assert "WARNING" not in server.log
        assert "sesame" not in server.log
        assert "other-key" not in server.log


@pytest.mark.long
def test_a_dead_worker_ends_the_server() -> None:
    """kill -9 of a worker: its requests get 500 with the reason, the process ends with status 1."""
    with serving("--tensor-parallel-size", "2", "--device", "cpu") as server:
        later = Later(server, {**ENDLESS, "n": 4})
        workers = [
            child
            for child in psutil.Process(server.process.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        ]
        assert len(workers) == 2
        workers[-1].kill()
        later.join()
        assert later.status == 500
        assert later.answer["error"]["code"] == "engine_dead"
        assert server.process.wait(10) == 1
        assert "the engine is dead" in server.log


def test_small_packets_are_sent_at_once() -> None:
    """Symptom: an answer takes 40 ms longer, until the client confirms its first packet. asyncio
    looks for the protocol of the socket that listens.
    """
    with bound_socket(ServerOptions(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_the_file_of_a_unix_socket_goes_with_the_server(
    async_llm: AsyncLLM, tmp_path: Path
) -> None:
    path = tmp_path / "server.sock"
    options = ServerOptions(uds=str(path))
    with bound_socket(options) as listener:
        server = EngineServer(make_app(async_llm, options), listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        assert path.exists()
        server.should_exit = True
        thread.join()
        assert listener.fileno() < 0
        assert not path.exists()
        path.write_text("another server's by now")
    assert path.exists()
    path.unlink()
    with pytest.raises(ConfigError, match="no model"), bound_socket(options):
        raise ConfigError("no model")
    assert not path.exists()


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    return cli.main(["serve", *argv]), capsys.readouterr().err


def test_a_taken_port_is_noticed_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, error = run(demo_model.MODEL, "--port", port, capsys=capsys)
    assert status == 2
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "--port" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "port must be"),
        (["--max-connections", "10000000"], "--max-connections must be an integer from 1 to"),
        (["--host", "not a host"], "; name another --host"),
        (["--host", "192.0.2.1"], "Cannot assign requested address; name another --host"),
        (["--uds", "x" * 200], "AF_UNIX path too long; name another --uds"),
        (["--api-key", "two words"], "an API key must be"),
        (["--tool-call-parser", "nothing"], "--tool-call-parser must be"),
        (["--temperature", "1"], "there is no flag --temperature"),
        (["prompt"], "'prompt' names no model: give a path, a hub id"),
    ],
)
def test_wrong_flags(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, error = run(demo_model.MODEL, *argv, capsys=capsys)
    assert status == 2
    assert message in error
    assert "two words" not in error


def test_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    status, error = run(demo_model.MODEL, capsys=capsys)
    assert status == 2
    assert "pip install -e '.[server]' -c constraints.txt" in error


@pytest.mark.long
def test_the_library_does_not_need_the_extras() -> None:
    code = (
        "import nanovllm.apps.cli.main, sys; nanovllm.LLM, nanovllm.AsyncLLM; "
        "sys.exit(bool(sys.modules.keys() & {'fastapi', 'uvicorn', 'pydantic', 'llguidance'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
