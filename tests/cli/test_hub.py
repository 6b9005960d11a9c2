"""`nanovllm show` and `run`, with a hub on localhost; and the commands that are gone."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import demo_model
from nanovllm.apps.cli.main import main
from tests.gguf_files import make_gguf
from tests.helpers import environment
from tests.hub_server import Hub, as_bytes, repository

COMMANDS = """
import json, resource, sys
from nanovllm.apps.cli.main import main

if most := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
for words in json.loads(sys.argv[2]):
    sys.stderr.write(f"status {main(words)}\\n")
"""
"""Runs commands one after the other: most of the time of one is that of its imports."""

DEMO: dict[str, Any] = {file.name: file.read_bytes() for file in Path(demo_model.MODEL).iterdir()}
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf")
    return Path(make_gguf(path / "made", "qwen3", "Q8_0", vocab_size=20)[0]).read_bytes()


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


def cached(tmp_path: Path, model: str, files: dict[str, Any], branch: str = "main") -> Path:
    """Lay out files as huggingface_hub's cache does; return the directory of the snapshot."""
    repo = tmp_path / "hub" / ("models--" + model.replace("/", "--"))
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / branch).write_text("a" * 40)
    for name, content in files.items():
        file = repo / "snapshots" / ("a" * 40) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(as_bytes(content))
    return repo / "snapshots" / ("a" * 40)


def test_show_finds_what_is_here(hub: Hub, run: Run, gguf: bytes, tmp_path: Path) -> None:
    demo = cached(tmp_path, "org/demo", DEMO)
    two = cached(tmp_path, "org/two", {"Q4/model.gguf": gguf, "model-Q8_0.gguf": gguf})
    one = cached(tmp_path, "org/one", {"config.json": "{}", "x.gguf": gguf}, branch="v2")
    cached(tmp_path, "org/part", {"config.json": DEMO["config.json"]})
    named = {
        "org/two:Q8_0": two / "model-Q8_0.gguf",
        "ORG/two:q8_0": two / "model-Q8_0.gguf",
        "hf.co/org/two:Q8_0": two / "model-Q8_0.gguf",
        "org/two/Q4/model.gguf": two / "Q4" / "model.gguf",
        str(two / "Q4" / "model.gguf"): two / "Q4" / "model.gguf",
        "org/demo": demo,
        "Org/Demo": demo,
        str(demo): demo,
        "org/one": one / "x.gguf",
    }
    out, _ = run(*(f"show {name} --json" for name in named))
    found = [json.loads(text) for text in re.split(r"(?<=^\})\n", out, flags=re.MULTILINE)[:-1]]
    assert [each["path"] for each in found] == [str(path) for path in named.values()]
    assert all(each["supported"] and each["is_whole"] for each in found)
    out, err = run("show org/part", "show org/no:Q8_0", "show org/two")
    assert re.search(r"^weights +not here: `hf download org/part` gets them$", out, re.MULTILINE)
    assert "'org/no:Q8_0' is not on this machine: `hf download org/no --include '*Q8_0.gg" in err
    assert "org/two holds 1 GGUF" not in err
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("pull --revision v2 org/tiny", "hf download OWNER/NAME"),
        ("list --json", "hf cache ls"),
        ("rm org/tiny", "hf cache rm model/OWNER/NAME"),
    ],
)
def test_commands_that_are_gone(
    capsys: pytest.CaptureFixture[str], command: str, instead: str
) -> None:
    assert main(command.split()) == 2
    found = capsys.readouterr()
    assert f"there is no command 'nanovllm {command.split()[0]}': `{instead}` " in found.err
    assert not found.out


def test_a_connection_that_is_cut_goes_on_where_it_was(hub: Hub, run: Run) -> None:
    """huggingface_hub writes 10 MiB at a time."""
    files = hub.repositories["org/demo"]["commits"]["d" * 40]
    files["model.safetensors"] = bytes(12 * 2**20)
    hub.cut["model.safetensors"] = [11 * 2**20]
    run("generate org/demo Hi")
    assert hub.ranges == [f"bytes={10 * 2**20}-"]


def test_what_the_hub_refuses(hub: Hub, run: Run) -> None:
    hub.gated.add("org/tiny")
    _, err = run("run org/tiny", "run org/none")
    assert f"who have accepted its terms, at {hub.url}/org/tiny, and are logged in: `hf a" in err
    assert "'org/none' is neither a directory here nor a model on the hub" in err
    assert err.count("status 2") == 2


def test_a_disk_that_takes_no_more(run: Run, tmp_path: Path) -> None:
    _, err = run("run org/demo", most=5000)
    assert f"cannot write 'org/demo' to {tmp_path}/hub: File too large; `hf cache rm` dele" in err
    assert not list(tmp_path.rglob("*.incomplete"))


def test_run_downloads_and_says_nothing_before_the_answer(hub: Hub, run: Run) -> None:
    hub.headers["X-HF-Warning"] = "topic; please log in"
    flags = "--max-tokens 8 --temperature 0"
    out, err = run(f"run hf.co/org/demo {flags}", f"generate ORG/Demo Hi {flags}", stdin="Hi\n")
    assert out == "Hi there! Ask me\n Hi there! Ask\n"
    assert err == "status 0\nstatus 0\n"
