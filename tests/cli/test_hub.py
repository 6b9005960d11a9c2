"""`nanovllm run` and `generate` with a hub on localhost; and the commands that are gone."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import demo_model
from nanovllm.apps.cli.main import main
from tests.helpers import environment
from tests.hub_server import Hub, repository

COMMANDS = """
import json, resource, sys
from nanovllm.apps.cli.main import main

if most := int(sys.argv[1]):
    sys.dont_write_bytecode = True  # Python would keep a file of bytecode that is cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
for words in json.loads(sys.argv[2]):
    sys.stderr.write(f"status {main(words)}\\n")
"""
"""Runs commands one after the other: most of the time of one is that of its imports."""

DEMO: dict[str, Any] = {file.name: file.read_bytes() for file in Path(demo_model.MODEL).iterdir()}
Run = Callable[..., tuple[str, str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    model = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights" * 1000}
    repositories = {
        "org/tiny": repository("a" * 40, dict(model)),
        "org/demo": repository("d" * 40, dict(DEMO)),
    }
    with Hub(repositories).running() as running:
        yield running


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    def run(*commands: str, stdin: str = "", most: int = 0, **variables: str) -> tuple[str, str]:
        """Run commands in one process; return what they wrote to the two streams."""
        ours = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        words = json.dumps([command.split() for command in commands])
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS, str(most), words],
            env=environment(**{**ours, **variables}),
            capture_output=True,
            input=stdin,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("pull --revision v2 org/tiny", "hf download OWNER/NAME"),
        ("rm org/tiny", "hf cache rm model/OWNER/NAME"),
    ],
)
def test_commands_that_are_gone(
    capsys: pytest.CaptureFixture[str], command: str, instead: str
) -> None:
    assert main(command.split()) == 2
    found = capsys.readouterr()
    assert f"there is no command 'nanovllm {command.split()[0]}': " in found.err
    assert f"`{instead}` " in found.err
    assert not found.out


def test_a_disk_that_takes_no_more(run: Run, tmp_path: Path) -> None:
    _, err = run("run org/demo", most=5000)
    assert f"cannot write 'org/demo' to {tmp_path}/hub: File too large; `hf cache rm` dele" in err
    assert not list(tmp_path.rglob("*.incomplete"))


def test_run_downloads_and_says_nothing_before_the_answer(hub: Hub, run: Run) -> None:
    """A model that the hub refuses is an error in a line."""
    hub.headers["X-HF-Warning"] = "topic; please log in"
    hub.gated.add("org/tiny")
    flags = "--max-tokens 8 --temperature 0"
    commands = f"run hf.co/org/demo {flags}", f"generate ORG/Demo Hi {flags}"
    out, err = run(*commands, "run org/tiny", "run org/none", stdin="Hi\n")
    assert out == "Hi there! Ask me\n Hi there! Ask\n"
    first, second, gated, third, missing, fourth = err.splitlines()
    assert [first, second, third, fourth] == ["status 0"] * 2 + ["status 2"] * 2
    assert f"who have accepted its terms, at {hub.url}/org/tiny, and are logged in: `hf a" in gated
    assert "'org/none' is neither a directory here nor a model on the hub" in missing
