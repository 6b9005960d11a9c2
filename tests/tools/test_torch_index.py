"""Where `make` takes torch from: the driver, the index and the user's own settings are asked."""

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_deploy import ROOT
from tools import torch_index


@pytest.fixture
def index() -> Iterator[str]:
    """An index that lists torch and nothing else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        server.shutdown()
        thread.join()


def printed(**variables: str) -> tuple[str, str]:
    """Return the options for pip and the line for the user."""
    names = (*torch_index.OF_PIP, "TORCH_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-m", "tools.torch_index"],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


def test_an_index_that_answers_is_one_more_for_pip(index: str) -> None:
    options, line = printed(TORCH_INDEX=index)
    assert options == f"--extra-index-url {index}\n"
    assert "for CPUs" in line


def test_an_index_that_does_not_answer_costs_seconds(
    index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: pip retries it for minutes, once for each package."""
    monkeypatch.setattr(torch_index, "SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts, nobody answers
        port = silent.getsockname()[1]
        began = time.monotonic()
        assert not torch_index.answers(f"http://127.0.0.1:{port}")
        assert time.monotonic() - began < 2
    for wrong in (f"http://127.0.0.1:{port}", f"{index}/another", "whl/cpu"):
        assert not torch_index.answers(wrong)
    assert torch_index.answers(f"{index}/")


def test_pips_own_settings_are_left_alone(index: str) -> None:
    for name in torch_index.OF_PIP:
        options, line = printed(**{name: "1"})
        assert options == ""
        assert name in line


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux")
@pytest.mark.parametrize(("result", "found"), [(0, True), (100, False)])  # 100: no device
def test_a_gpu_is_what_the_driver_finds(result: int, found: bool, tmp_path: Path) -> None:
    driver = tmp_path / "libcuda.so.1"
    code = f"int cuInit(unsigned flags) {{ return {result}; }}"
    compile_it = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(driver)]
    subprocess.run(compile_it, input=code, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-c", "from tools.torch_index import has_gpu; print(has_gpu())"],
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(found)
