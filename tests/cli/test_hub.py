"""`nanovllm pull`, `list`, `show`, `rm` and `run`, with a hub on localhost."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanovllm import demo_model
from tests.gguf_files import make_gguf
from tests.helpers import environment
from tests.hub_server import Hub, repository

COMMANDS = """
import json, resource, sys
from nanovllm.apps.cli.main import main

if most := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
for words in json.loads(sys.argv[2]):
    sys.stderr.write(f"status {main(words)}\\n")
"""
"""Runs commands one after the other: most of the time of one is that of its imports."""

Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf")
    return Path(make_gguf(path / "made", "qwen3", "Q8_0", vocab_size=20)[0]).read_bytes()


@pytest.fixture
def hub(gguf: bytes) -> Iterator[Hub]:
    model = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights" * 1000}
    files: dict[str, str | bytes] = {f"model-{tag}.gguf": gguf for tag in ("Q4_K_M", "Q8_0")}
    files["model-Q4_K_M.gguf"] += b" "  # the same content would be kept once
    repositories = {
        "org/tiny": repository("a" * 40, dict(model)),
        "org/two": repository("b" * 40, files),
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


def test_pull_list_show_and_rm(hub: Hub, run: Run, tmp_path: Path) -> None:
    out, err = run("list", "pull org/tiny", "pull org/two:Q8_0", "pull org/two:q4_k_m", "list")
    assert err.count("status 0") == 5
    assert err.startswith("nanovllm: no models are here yet")
    assert "org/tiny is here and checked: 6.84 KiB in " in err
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["org/tiny", "org/two:Q4_K_M", "org/two:Q8_0"]
    hub.fetched.clear()
    out, err = run(
        *("show org/two:Q8_0", "show org/two", "show org/no", "rm org/two:Q8_0 org/tiny"),
        *("rm org/two:Q8_0", "list", "rm org/two", "list"),
        HF_HUB_OFFLINE="1",
    )
    *report, last = [line.split() for line in out.splitlines()]
    assert ["revision", "b" * 40] in report
    assert ["architecture", "Qwen3ForCausalLM"] in report
    assert "org/two holds 2 models; name one of them: org/two:Q4_K_M, org/two:Q8_0" in err
    assert "'org/no' is not in the cache: `nanovllm pull org/no` gets it; " in err
    assert "org/two:Q8_0 is deleted: " in err
    assert "model 'org/two:Q8_0' is not in the cache" in err
    assert last[0] == "org/two:Q4_K_M"
    assert "no models are here yet" in err
    left = [path for path in (tmp_path / "hub").rglob("*") if path.is_file()]
    assert not [path for path in left if path.suffix == ".gguf" or "blobs" in path.parts]
    assert hub.fetched == []


def test_a_connection_that_is_cut_goes_on_where_it_was(hub: Hub, run: Run) -> None:
    """huggingface_hub writes 10 MiB at a time."""
    files = hub.repositories["org/tiny"]["commits"]["a" * 40]
    files["model.safetensors"] = bytes(12 * 2**20)
    hub.cut["model.safetensors"] = [11 * 2**20]
    assert "is here and checked" in run("pull org/tiny")[1]
    assert hub.ranges == [f"bytes={10 * 2**20}-"]


def test_a_damaged_file_is_deleted_and_pulled_again(hub: Hub, run: Run) -> None:
    hub.damaged.add("model.safetensors")
    out, err = run("pull org/tiny", "list")
    assert "model.safetensors of 'org/tiny' came damaged: its SHA-256 is not the hub's" in err
    assert "status 2" in err
    assert "without weights: pull it" in out
    hub.damaged.clear()
    hub.fetched.clear()
    assert "is here and checked" in run("pull org/tiny")[1]
    assert [name for _, name in hub.fetched] == ["model.safetensors"]


def test_what_the_hub_refuses(hub: Hub, run: Run) -> None:
    hub.gated.add("org/tiny")
    _, err = run("pull org/two:Q8_0", "pull org/tiny", "pull org/none", f"pull {demo_model.MODEL}")
    assert f"who have accepted its terms, at {hub.url}/org/tiny, and are logged in: `hf a" in err
    assert "'org/none' is neither a directory here nor a model on the hub" in err
    assert err.count("; here are: org/two:Q8_0\n") == 2
    assert "is a path on this machine: nothing is to be pulled" in err
    assert err.count("status 2") == 3


def test_a_disk_that_takes_no_more(run: Run, tmp_path: Path) -> None:
    _, err = run("pull org/tiny", most=5000)
    assert f"cannot write 'org/tiny' to {tmp_path}/hub: File too large; `nanovllm rm` dele" in err
    assert not list(tmp_path.rglob("*.incomplete"))


def test_run_pulls_first(hub: Hub, run: Run) -> None:
    model = Path(demo_model.MODEL)
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    hub.repositories["org/demo"] = repository("d" * 40, dict(files))
    out, err = run("run org/demo --max-tokens 8 --temperature 0", stdin="Hi\n")
    assert err.index("org/demo is here and checked") < err.index("status 0")
    assert out == "Hi there! Ask me\n"
