"""`nanovllm lab new`: files that run as they are, and names that are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.apps.lab.new import KINDS, write_plugin
from tests.helpers import assert_idle

PROMPTS = ["What is a KV cache?", "A KV cache is", "What is a token?"] * 2
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FEW_PAGES = {"max_model_len": 64, "kvcache_block_size": 16, "num_kvcache_blocks": 8}
OPTIONS: dict[str, Any] = {
    "policy": {"scheduling_policy": "my_policy:MyPolicy", "max_num_seqs": 2},
    "eviction": {"eviction_policy": "my_eviction:MyEviction", **FEW_PAGES},
    "tier": {"kv_store": "my_tier:MyTier"},
    "backend": {"attention_backend": "my_backend:MyBackend"},
    "format": {"quantization": "my_format:MyFormat"},
    "proposer": {"speculative_config": {"method": "my_proposer:MyProposer"}},
    "family": {"model_family": "my_family:MyFamily"},
    "rule": {"logits_rules": ["my_rule:MyRule"]},
    "runner": {"step_runner": "my_runner:MyRunner"},
}
"""Engine options with the plugin of each kind."""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder where Python finds modules, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of `PROMPTS` without plugins."""
    llm = LLM(demo_model.MODEL, max_model_len=64)
    tokens = [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    llm.shutdown()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_runs(
    kind: str, lab: Path, expected: list[list[int]], make_llm: Any, capsys: Any
) -> None:
    assert cli.main(["lab", "new", kind]) == 0
    assert capsys.readouterr().out.startswith(f"my_{kind}.py: ")
    options = {"max_model_len": 64, "num_kvcache_blocks": 64} | OPTIONS[kind]
    llm = make_llm(demo_model.MODEL, device="cpu", **options)
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    if kind != "format":  # which rounds weights
        assert [output.token_ids for output in found] == expected
    assert_idle(llm)


def test_the_file_and_the_class_have_the_name(lab: Path) -> None:
    text = write_plugin("policy", "shortest_first", lab).read_text()
    assert "class ShortestFirst(Policy):" in text
    assert "--scheduling-policy shortest_first:ShortestFirst" in text
    assert "my_policy" not in text.lower()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: KIND (see nanovllm lab new --help)"),
        (["polcy"], "KIND must be one of policy, eviction, tier"),
        (["policy", "two words"], "NAME must be that of a Python module in lower case"),
        (["policy", "class"], "NAME must be that of a Python module in lower case"),
        (["policy", "_"], "NAME must be that of a Python module in lower case"),
        (["policy", "x" * 300], "NAME must be that of a Python module in lower case"),
        (["policy", "heapq"], "NAME 'heapq' is that of a module that Python finds already"),
        (["policy", "mine"], "mine.py is there already: give another NAME, or remove it"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, lab: Path, capsys: Any) -> None:
    (lab / "mine.py").write_text("mine = 1")
    assert cli.main(["lab", "new", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"nanovllm: {message}")
    assert [path.name for path in lab.iterdir()] == ["mine.py"]
    assert (lab / "mine.py").read_text() == "mine = 1"


def test_lab_alone_asks_for_a_command(capsys: Any) -> None:
    assert cli.main(["lab"]) == 2
    assert "required: COMMAND (see nanovllm lab --help)" in capsys.readouterr().err
    assert cli.main(["lab", "nwe"]) == 2
    assert "no command 'nanovllm lab nwe'" in capsys.readouterr().err
