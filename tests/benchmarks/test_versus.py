"""benchmarks.versus runs engines in turn on the same requests and prints a table of their times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import QWEN3_06B
from benchmarks.comparison import Comparison, Row
from benchmarks.random_gguf import write_random_gguf
from benchmarks.versus import CASES
from nanovllm import LLM, SamplingParams
from nanovllm.loading.gguf import read_gguf

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def model(tmp_path: Path) -> str:
    small = {
        "vocab_size": 10240,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "eos_token_id": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_06B, **small}))
    return str(tmp_path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.versus", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
    )


def fake(path: Path, answer: str, version: str = "") -> str:
    """Return an executable that is ready at once and runs `answer` for each line of its input."""
    ready = f"echo 'ready to be measured 0 {version}'"
    path.write_text(f"#!/bin/sh\n{ready}\nwhile read line; do {answer}; done\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_turns_share_their_prefix() -> None:
    turns = CASES["agent"].requests("agent 0")
    assert [len(prompt) for [prompt], _ in turns] == [6000, 6300, 6600, 6900, 7200]
    [last] = turns[-1][0]
    assert all(last[: len(prompt)] == prompt for [prompt], _ in turns)
    assert all(output_lens == [64] for _, output_lens in turns)
    assert CASES["agent"].max_model_len == 7264
    assert CASES["nano"].requests("nano 0") != CASES["sampled"].requests("sampled 0")


def test_table(model: str, tmp_path: Path) -> None:
    other = fake(tmp_path / "other", "echo 'ready to be measured 1'")
    done = run("nanovllm", f"transformers={other}", "--model", model, "--rounds", "1",
               "--cases", "decode1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows[2:]] == [
        [case, engine]
        for case in ("start until ready", "decode1")
        for engine in ("nanovllm", "transformers")
    ]
    ours, other = rows[4:]
    assert ours[-1] == "1.00"
    assert all(float(cell) > 0 for cell in ours[2:] + other[2:])


def test_json_has_the_tables_rows(tmp_path: Path) -> None:
    two = fake(tmp_path / "two", "echo 'ready to be measured 2'", "1.5")
    three = fake(tmp_path / "three", "echo 'ready to be measured 3'")
    path = tmp_path / "comparison.json"
    done = run(f"vllm={two}", f"transformers={three}", "--cases", "decode1", "--rounds", "2",
               "--json", str(path), "--cores", "0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Comparison.load(path)
    assert found.table()[0] == (
        "| random weights, Qwen3-0.6B's shape | 1 sequence, 32 tokens in, 64 out | vllm | 2.00 "
        "| 32.0 out | 1.00 |"
    )
    assert found.rows == [
        Row("decode1", "vllm", 2.0, 1.0, [2.0, 2.0]),
        Row("decode1", "transformers", 3.0, 1.5, [3.0, 3.0]),
    ]
    assert list(found.startup) == ["vllm", "transformers"]
    assert found.cases == {"decode1": "1 sequence, 32 tokens in, 64 out"}
    assert found.command.startswith(f"python -m benchmarks.versus vllm={two} ")
    assert (found.cores, found.tokens) == ([0], {"decode1": [32, 64]})
    assert found.versions == {"vllm": "1.5", "transformers": ""}
    assert "random weights" in found.model


def test_random_gguf_is_a_model(tmp_path: Path) -> None:
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    path = tmp_path / "model.gguf"
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32}
    write_random_gguf(path, {**QWEN3_06B, **small, **heads, "eos_token_id": 0}, "Q8_0")
    found = read_gguf(path).config
    assert {name: found[name] for name in small} == small
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first, second = LLM(str(path), max_model_len=64).generate([[1, 2, 3], [4, 5, 6]], params)
    assert first.token_ids != second.token_ids


def test_shapes_without_a_random_gguf() -> None:
    done = run("nanovllm", "--gguf", "Q8_0", "--model", "other")
    assert done.returncode == 1
    assert "shape" in done.stderr


def test_an_engine_that_ends_while_it_is_measured(tmp_path: Path) -> None:
    """The engines after it must be ended too. Here a stopped one would keep stderr open."""
    ends = fake(tmp_path / "ends", "exit 3")
    stays = fake(tmp_path / "stays", "echo 'ready to be measured 1'")
    done = run(f"vllm={ends}", f"transformers={stays}")
    assert "versus.py: vllm ended with 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_is_named_twice() -> None:
    done = run("nanovllm", "nanovllm")
    assert done.returncode == 2
    assert "once at most" in done.stderr
