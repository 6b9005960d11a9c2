"""The image without Docker: the Dockerfile's commands in a fresh directory, and its server.

Takes minutes and 2 GB, so it runs when asked for: IMAGE=1 pytest tests/test_image.py
"""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_deploy import ROOT, values

pytestmark = [
    pytest.mark.skipif("IMAGE" not in os.environ, reason="takes minutes: set IMAGE=1"),
    pytest.mark.timeout(1800),
]
logger = logging.getLogger(__name__)
BASE_BYTES = 0.126e9
"""Debian bookworm with Python, of which no file is removed."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the second stage copies out of the first."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "src"
    source.mkdir()
    for value in values("COPY"):
        if "--from" not in value:
            for name in value.split()[:-1]:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, source / name)
    settings = [*values("ARG"), *values("ENV")[0].split()]
    environment = dict(word.split("=", 1) for word in settings) | os.environ
    for command in values("RUN"):
        if "/opt/" not in command:
            continue  # packages of Debian, and a user
        command = command.replace("/opt/", f"{folder}/")
        command = re.sub(r"^python ", f"{sys._base_executable} ", command)
        subprocess.run(command, shell=True, check=True, cwd=source, env=environment)
    shutil.rmtree(source)  # nothing may refer to it
    yield folder / "nanovllm"
    shutil.rmtree(folder)


def test_it_serves_and_ends(image: Path, tmp_path: Path) -> None:
    """Without a compiler and with an empty cache, the first start has compiled kernels."""
    size = sum(path.lstat().st_size for path in image.rglob("*") if not path.is_symlink())
    logger.info("%.0f MB", size / 1e6)
    assert size + BASE_BYTES < 0.95e9
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (entry,), (check,) = values("ENTRYPOINT"), values("HEALTHCHECK")
    environment = {"PATH": str(image / "bin"), "HOME": str(tmp_path)}
    command = [*json.loads(entry), "--port", str(port)]
    probe = json.loads(check[check.index("[") :].replace(":8000", f":{port}"))
    log = tmp_path / "log"
    for start in ("first", "second"):
        began = time.monotonic()
        with log.open("w") as output:
            server = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=output)
        try:
            while subprocess.run(probe, env=environment, stderr=subprocess.DEVNULL).returncode:
                assert server.poll() is None
                assert time.monotonic() - began < 300  # --start-period
                time.sleep(0.1)
            logger.info("%s start: %.1f s", start, time.monotonic() - began)
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps({"prompt": "A KV cache", "max_tokens": 8, "temperature": 0}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 8
        finally:
            server.terminate()
            assert server.wait(timeout=60) == 0
        assert "native CPU kernels are on" in log.read_text()
    assert not list(tmp_path.rglob("*.so"))
