"""Imports of vLLM's names: they work, or say what to use, and hide nothing else."""

import importlib
import importlib.util
import inspect
import re
import sys
from typing import Any

import pytest

import nanovllm
from nanovllm import AsyncLLM, Config, outputs
from nanovllm.compat import modules
from nanovllm.compat.engine_args import AsyncEngineArgs, EngineArgs
from nanovllm.compat.moved import MOVED
from nanovllm.errors import ConfigError

NANO_VLLM = {
    "nanovllm": "LLM SamplingParams",
    "nanovllm.config": "Config",
    "nanovllm.engine.llm_engine": "LLMEngine",
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


@pytest.mark.parametrize("module", modules.MODULES)
def test_vllms_modules_can_be_imported(module: str) -> None:
    for name in modules.MODULES[module].split():
        names: dict[str, Any] = {}
        exec(f"from {module} import {name}", names)
        assert names[name] is getattr(importlib.import_module(modules.HOMES[name]), name)
    exec(f"import {module}")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import nanovllm.multimodal.utils", "read text only"),
        ("from nanovllm import LLM, PoolingParams", "generate text; use sentence-transformers"),
        (
            "from nanovllm.sampling_params import GuidedDecodingParams",
            "StructuredOutputsParams",
        ),
        ("from nanovllm.config import VllmConfig", "take all options by name"),
        ("from nanovllm.v1.sample.logits_processor import BatchUpdate", "logits_processors="),
        ("from nanovllm.logger import init_logger", "use logging"),
        ("from nanovllm import Foo", "cannot import name 'Foo' from 'nanovllm'"),
        ("from nanovllm.utils import foo", "cannot import name 'foo' from 'nanovllm.utils'"),
        ("from nanovllm.v1 import foo", "cannot import name 'foo' from 'nanovllm.v1'"),
        (
            "from nanovllm.config import foo",
            "cannot import name 'foo' from 'nanovllm.config'",
        ),
        ("import nanovllm.foo.bar", "No module named 'nanovllm.foo'"),
    ],
)
def test_other_imports_say_what_to_use(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        exec(statement)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MOVED for name in MOVED[module]]
)
def test_nano_vllms_names_say_where_they_are(module: str, name: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {name}")
    place = MOVED[module][name]
    message = str(caught.value)
    assert message.startswith(f"{module} of nano-vllm is not here as it is there: for ")
    assert re.search(rf"\b{name}\b.* see {place}", message)
    home, _, here = place.rpartition(".")
    assert hasattr(importlib.import_module(home), here)


def test_nano_vllms_names_that_are_here_can_be_imported() -> None:
    for module, names in NANO_VLLM.items():
        for name in names.split():
            exec(f"from {module} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'LinearBass'"):
        exec("from nanovllm.layers.linear import LinearBass")
    linear = importlib.import_module("nanovllm.layers.linear")
    assert inspect.getsource(linear).startswith('"""')
    assert not hasattr(linear, "foo")


def test_attributes_of_the_package() -> None:
    assert nanovllm.EngineArgs is EngineArgs
    reader = importlib.import_module("nanovllm.v1.metrics.reader")
    assert reader.Histogram is outputs.Histogram
    assert not hasattr(nanovllm, "PoolingParams")
    with pytest.raises(AttributeError, match="generate text"):
        nanovllm.PoolingParams  # noqa: B018
    assert importlib.util.find_spec("nanovllm.zzz") is None
    modules.install()
    assert sum(type(finder).__name__ == "_Importer" for finder in sys.meta_path) == 1


def test_engine_args_are_options_that_can_be_assigned() -> None:
    args = AsyncEngineArgs("model", max_model_len=None, seed=None, enable_lora=False)
    assert vars(args) == vars(Config("model"))
    assert args.enable_lora is False
    args.max_model_len = 128
    args.speculative_config = {"method": "ngram"}
    args.enable_lora = False
    assert vars(args) == vars(
        Config("model", max_model_len=128, speculative_config={"method": "ngram"})
    )
    for name, value, message in (
        ("max_model_len", 0, "max_model_len must be"),
        ("max_modle_len", 1, "did you mean 'max_model_len'"),
    ):
        with pytest.raises(ConfigError, match=message):
            setattr(args, name, value)
    assert args.max_model_len == 128
    with pytest.raises(AttributeError, match="no field 'foo'"):
        args.foo  # noqa: B018
    with pytest.raises(ConfigError, match="no field 'foo'"):
        EngineArgs("model", foo=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        AsyncLLM.from_engine_args(args, usage_context="any", foo=1)
