"""Dockerfile and systemd unit: what they name exists here. No image is built, no unit started."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from nanovllm.apps.cli import main as cli
from nanovllm.apps.server import serve
from nanovllm.apps.server.middleware import OPEN_PATHS
from nanovllm.apps.server.server_options import API_KEY_VARIABLE, ServerOptions
from tools import torch_index

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "deploy/nanovllm.service").read_text()
INSTRUCTIONS = re.findall(r"^([A-Z]+) (.*)", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)
SETTINGS = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))


def values(name: str) -> list[str]:
    return [value for found, value in INSTRUCTIONS if found == name]


def parsed(command: list[str]) -> ServerOptions:
    """Return the server's options of a command line, as `nanovllm` reads it."""
    program, *arguments = command
    assert Path(program).name == "nanovllm"
    args = cli._parse(arguments)
    assert args.command is cli.serve
    return ServerOptions(host=args.host)


def test_image_copies_what_there_is_and_what_docker_may_see() -> None:
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if "!" in line}
    copied = [value.split()[:-1] for value in values("COPY") if "--from" not in value]
    names = {name for line in copied for name in line}
    assert names == seen
    assert all((ROOT / name).exists() for name in names)


def test_image_serves_as_a_user_without_rights() -> None:
    (entry,) = values("ENTRYPOINT")
    options = parsed([word.strip('",[] ') for word in entry.split(",")])
    assert options.host == "0.0.0.0"
    (user,) = values("USER")
    assert int(user) > 0
    (port,) = values("EXPOSE")
    assert int(port) == options.port
    (check,) = values("HEALTHCHECK")
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert url is not None
    assert int(url[1]) == options.port
    assert url[2] in OPEN_PATHS, "the check has no API key"
    assert "latest" not in "".join(values("FROM"))
    assert "-c constraints.txt" in DOCKERFILE
    (torch,) = values("ARG")
    assert torch == f"TORCH_INDEX={torch_index.CPU_INDEX}"


def test_unit_serves_on_loopback_and_waits_for_the_drain() -> None:
    options = parsed(shlex.split(SETTINGS["ExecStart"]))
    assert options.host == "127.0.0.1"
    slowest = options.drain_seconds + serve.FLUSH_SECONDS + serve._EXIT_SECONDS
    assert slowest <= int(SETTINGS["TimeoutStopSec"])
    assert API_KEY_VARIABLE in UNIT
    for name in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp"):
        assert SETTINGS[name] == "yes"
    assert SETTINGS["ProtectSystem"] == "strict"
    assert SETTINGS["Restart"] == "on-failure"
    assert "MemoryDenyWriteExecute" not in SETTINGS, "the kernels are compiled code"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "nanovllm.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
