"""What a router does that an engine's own server need not, with an engine in this process."""

import json
import socket
import threading
from pathlib import Path

import httpx
import pytest

from nanovllm import AsyncLLM
from nanovllm.apps.router.models import Models
from nanovllm.apps.router.router_options import RouterOptions, read_models
from nanovllm.apps.router.serve import RouterServer, make_app
from nanovllm.apps.server.admission import AnswerBudget
from nanovllm.apps.server.info_route import may_chat
from nanovllm.apps.server.request_log import Log
from nanovllm.apps.server.serve import bound_socket
from nanovllm.apps.server.server_options import ServerOptions
from tests.helpers import wait_until
from tests.server.conftest import routed
from tests.server.test_load import Ended


@pytest.mark.long
def test_a_slow_reader_does_not_keep_its_model(async_llm: AsyncLLM) -> None:
    """Symptom: no other model came into memory, and its own took no requests, until it had read."""
    body = {"prompt": [1], "max_tokens": 900, "n": 8, "ignore_eos": True, "stream": True}
    raw = json.dumps({**body, "logprobs": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw)
    with routed(async_llm, {"read_timeout": 20.0}) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((server.host, server.port))
        client.sendall(head + raw)
        assert client.recv(1)
        wait_until(lambda: async_llm.engine.is_finished(), 60)
        wait_until(lambda: server.send("/v1/models").body["data"][0]["requests"] == 0, 5)
        client.settimeout(20)
        whole = b"".join(iter(lambda: client.recv(2**16), b""))
    assert whole.endswith(b"0\r\n\r\n")
    assert b"data: [DONE]" in whole
    assert whole.count(b'"finish_reason":"length"') == 8


def test_who_has_most_unread_is_cut_off() -> None:
    backlog = AnswerBudget(100)
    small, large = Ended(), Ended()
    for request, size in ((small, 30), (large, 60), (small, 10)):
        backlog.add(request.cut, size)
    assert not large.is_cut
    backlog.add(small.cut, 5)
    assert (small.is_cut, large.is_cut) == (False, True)
    backlog.add(small.cut, 50)
    assert not small.is_cut


def test_a_router_without_a_loaded_model(tmp_path: Path) -> None:
    """Symptom: a request that came at once was refused. And what a page of another site could send
    loaded a model, which pushed another out of memory.
    """
    options = ServerOptions(port=0)
    log = Log(options.log_level, options.log_format)
    models = Models(read_models(["a=x/y"], {}, {}), options, RouterOptions(), str(tmp_path), log)
    connected = threading.Event()
    with bound_socket(options) as listener:

        def connect() -> None:
            socket.create_connection(listener.getsockname(), timeout=5).close()
            connected.set()

        server = RouterServer(make_app(models, options), models, options, listener, connect)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert connected.wait(10)
        url = "http://{}:{}".format(*listener.getsockname())
        forms = {"Content-Type": "text/plain"}
        assert httpx.get(f"{url}/tokenizer_info?model=a").status_code == 503
        assert httpx.get(f"{url}/tokenizer_info").json()["error"]["code"] == "no_model_loaded"
        assert httpx.post(f"{url}/v1/completions", headers=forms, content="{}").status_code == 415
        assert (models.all[0].engine, models.all[0].loading) == (None, None)
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    ("architecture", "settings", "chats"),
    [
        ("Qwen3ForCausalLM", {"chat_template": "{{ messages }}"}, True),
        ("Qwen3ForCausalLM", {}, False),
        ("BertModel", {"chat_template": "{{ messages }}"}, False),
    ],
)
def test_a_page_knows_before_a_model_is_loaded_whether_it_chats(
    architecture: str, settings: dict[str, str], chats: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert may_chat(str(tmp_path), has_template=False) == chats
    assert may_chat("no/where", has_template=False) is None
