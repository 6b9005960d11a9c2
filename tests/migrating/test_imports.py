"""Imports of vLLM's and nano-vllm's names: they work, or are an ordinary error."""

import importlib
import re
import typing
from pathlib import Path

import pytest

import nanovllm
from nanovllm import llm, outputs, vllm

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
NANO_VLLM = {
    "nanovllm": "LLM SamplingParams",
    "nanovllm.config": "Config",
    "nanovllm.engine.block_manager": "Block BlockManager",
    "nanovllm.engine.llm_engine": "LLMEngine",
    "nanovllm.engine.model_runner": "ModelRunner",
    "nanovllm.engine.scheduler": "Scheduler",
    "nanovllm.engine.sequence": "Sequence",
    "nanovllm.layers.attention": "Attention",
    "nanovllm.layers.embed_head": "VocabParallelEmbedding ParallelLMHead",
    "nanovllm.layers.layernorm": "RMSNorm",
    "nanovllm.layers.linear": """divide LinearBase ColumnParallelLinear MergedColumnParallelLinear
        QKVParallelLinear RowParallelLinear""",
    "nanovllm.layers.rotary_embedding": "RotaryEmbedding",
    "nanovllm.llm": "LLM",
    "nanovllm.models.qwen3": "Qwen3ForCausalLM",
    "nanovllm.sampling_params": "SamplingParams",
}
"""By module of nano-vllm's: the names that are in the same place here."""


def test_the_package_has_the_class_that_editors_show() -> None:
    """Symptom: `nanovllm.LLM` is a subclass in another file."""
    assert nanovllm.LLM is llm.LLM
    assert nanovllm.LLM.__module__ == "nanovllm.llm"
    assert nanovllm.AsyncLLM.__module__ == "nanovllm.async_llm"


@pytest.mark.parametrize("module", NANO_VLLM)
def test_nano_vllms_names_can_be_imported(module: str) -> None:
    for name in NANO_VLLM[module].split():
        exec(f"from {module} import {name}")


def test_nano_vllms_other_names_are_where_the_page_says() -> None:
    """The table's rows, and each of its places."""
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `(nanovllm\.[\w.]+)` \| (.+) \| `([\w.]+)\.(\w+)` \|$", text, re.M)
    assert len(rows) > 9
    for module, names, home, place in rows:
        assert hasattr(importlib.import_module(home), place)
        for name in re.findall(r"`(\w+)`", names):
            with pytest.raises(ImportError):
                exec(f"from {module} import {name}")


def test_nanovllm_vllm_has_vllms_names() -> None:
    for name in vllm.__all__:
        exec(f"from nanovllm.vllm import {name}")
    assert vllm.Histogram is outputs.Histogram
    with pytest.raises(TypeError, match=r"^AsyncLLM\.generate\(\) "):
        vllm.AsyncLLM.generate(no_such=1)  # type: ignore[call-arg]
    assert str(vllm.LLM) == "<class 'nanovllm.vllm.LLM'>"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from nanovllm import EngineArgs", "'EngineArgs': nanovllm.vllm has it"),
        ("from nanovllm import LLM, GuidedDecodingParams", "use structured_outputs, such as"),
        ("from nanovllm import stream", "cannot import name 'stream' from 'nanovllm'"),
        ("from nanovllm import Foo", "cannot import name 'Foo' from 'nanovllm'"),
        ("from nanovllm.vllm import Foo", "cannot import name 'Foo' from 'nanovllm.vllm'"),
        ("from nanovllm.config import foo", "cannot import name 'foo' from 'nanovllm.config'"),
        ("import nanovllm.foo.bar", "No module named 'nanovllm.foo'"),
    ],
)
def test_other_imports_say_what_to_use(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=re.escape(message)):
        exec(statement)


def test_a_misspelled_name_is_no_import_error() -> None:
    assert not hasattr(nanovllm, "LMM")
    assert not hasattr(vllm, "LMM")


def test_prompts_are_dictionaries() -> None:
    assert typing.is_typeddict(vllm.TextPrompt)
    assert typing.is_typeddict(vllm.TokensPrompt)
