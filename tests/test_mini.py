"""docs/mini.py, the engine in one file, runs and gives what `LLM` gives."""

import importlib.util
import runpy
from types import ModuleType
from typing import Any

import pytest

from nanovllm import SamplingParams, demo_model
from nanovllm.testing.invariants import check_scheduler
from tests.glossary import QUESTIONS
from tests.helpers import ROOT

PATH = ROOT / "docs" / "mini.py"


@pytest.fixture(scope="module")
def mini() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mini", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_prints_what_the_walk_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(PATH)])
    runpy.run_path(str(PATH), run_name="__main__")
    shown = f"```text\n{capsys.readouterr().out}```"
    assert shown in (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options", [{}, {"num_kvcache_blocks": 10, "max_model_len": 160, "kvcache_block_size": 32}]
)
def test_many_prompts_have_the_texts_of_llm(
    mini: ModuleType, options: dict[str, int], make_llm: Any, preempted: list[tuple[int, int]]
) -> None:
    """With the small pool, sequences are preempted and computed again."""
    params = SamplingParams(temperature=0, max_tokens=100)
    llm = mini.MiniLLM(demo_model.MODEL, **options)
    found = llm.generate(QUESTIONS[:12], params)
    assert bool(preempted) == bool(options)
    expected = make_llm(demo_model.MODEL, device="cpu").generate(QUESTIONS[:12], params)
    assert found == [output.text for output in expected]
    check_scheduler(llm.scheduler)
    assert llm.block_manager.num_free_blocks == len(llm.block_manager.blocks)
