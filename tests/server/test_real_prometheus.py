"""Prometheus itself scrapes a server and answers the queries of the board and of the alert rules.

Runs where its commands are: apt-get install prometheus.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running
from tests.server.dashboards import FOLDER, queries

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not installed",
)


@pytest.fixture(scope="module")
def prometheus(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has scraped the server twice, with requests between."""
    folder = tmp_path_factory.mktemp("prometheus")
    text = (FOLDER / "prometheus.yml").read_text()
    text = text.replace("127.0.0.1:8000", f"{server.host}:{server.port}")
    text = text.replace("15s", "1s").replace("10s", "1s")
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(FOLDER / "alerts.yml", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    url = f"http://{address}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(url, "vllm:num_requests_running", process, folder / "log")
        body = {"prompt": "A KV cache", "max_tokens": 8, "temperature": 0}
        assert server.send("/v1/completions", body).status == 200
        server.send("/v1/completions", {**body, "temperature": -1})
        wait_for(url, "sum(vllm:generation_tokens_total) > 7", process, folder / "log")
        time.sleep(2)  # rates need two scrapes
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(url: str, query: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until a query has a result."""
    for _ in range(300):
        assert process.poll() is None, log.read_text()
        try:
            if ask(url, "query", query=query)["result"]:
                return
        except OSError:  # it starts
            pass
        time.sleep(0.2)
    raise AssertionError(f"{query} has no result: {log.read_text()}")


def ask(url: str, what: str, **arguments: str) -> Any:
    """Return what Prometheus' API answers."""
    words = urllib.parse.urlencode(arguments)
    with urllib.request.urlopen(f"{url}/api/v1/{what}?{words}", timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    return found["data"]


def test_promtool_accepts_the_files() -> None:
    for kind, name in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        command = ["promtool", "check", kind, str(FOLDER / name)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr


def test_every_query_has_an_answer(prometheus: str) -> None:
    """Those of the board have values, but for speculation, which the server does not have."""
    empty = []
    for query in queries():
        if not ask(prometheus, "query", query=query)["result"]:
            empty.append(query)
    unexpected = [
        query for query in empty if not ("spec_decode" in query or " > " in query or "==" in query)
    ]
    assert all("refused" in query for query in unexpected), unexpected


def test_the_rules_run_and_none_fires(prometheus: str) -> None:
    found = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert len(found) == sum(1 for query in queries() if " > " in query or "== 0" in query)
    assert {rule["health"] for rule in found} <= {"ok", "unknown"}
    assert {rule["state"] for rule in found} == {"inactive"}
