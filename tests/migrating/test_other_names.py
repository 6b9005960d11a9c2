"""Options of other engines: accepted where nothing changes, and else explained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from nanovllm.errors import ConfigError, InvalidRequestError, NanoVLLMError
from nanovllm.options.config import Config
from nanovllm.options.other_names import (
    ANY,
    CONFIG_NAMES,
    CONFIG_VALUES,
    SAMPLING_NAMES,
    SPECULATIVE_METHODS,
    SPECULATIVE_NAMES,
    STRUCTURED_NAMES,
    OtherName,
)
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.speculative_config import METHODS, SpeculativeConfig
from nanovllm.options.structured_outputs import StructuredOutputsParams

OWNERS: list[tuple[Any, dict[str, Any], Mapping[str, OtherName]]] = [
    (Config, {"model": "model"}, CONFIG_NAMES),
    (SpeculativeConfig, {"method": "ngram"}, SPECULATIVE_NAMES),
    (SamplingParams, {"temperature": 0.5}, SAMPLING_NAMES),
    (StructuredOutputsParams, {"regex": "a"}, STRUCTURED_NAMES),
]
"""Each class, arguments of it, and its table."""


@pytest.mark.parametrize(
    ("owner", "given", "name", "other"),
    [
        pytest.param(owner, given, name, other, id=f"{owner.__name__}-{name}")
        for owner, given, names in OWNERS
        for name, other in names.items()
    ],
)
def test_names_are_accepted_where_nothing_changes_and_else_explained(
    owner: Any, given: dict[str, Any], name: str, other: OtherName
) -> None:
    is_any = any(value is ANY for value in other.accepted)
    for value in (None, *((5, "text") if is_any else other.accepted)):
        assert owner(**given, **{name: value}) == owner(**given)
    if is_any:
        return
    with pytest.raises(NanoVLLMError) as raised:
        owner(**given, **{name: "something else"})
    assert str(raised.value) == f"{name}='something else' is not supported: {other.advice}"


def test_errors_of_speculation_name_the_option() -> None:
    with pytest.raises(ConfigError, match="^speculative_config: revision='v1' is not supported: "):
        Config("model", speculative_config={"method": "ngram", "revision": "v1"})


def test_code_of_a_checkpoint_is_not_run_whatever_is_trusted(caplog):
    caplog.set_level("INFO", "nanovllm")
    assert Config("model", trust_remote_code=True) == Config("model")
    expected = "trust_remote_code=True changes nothing: a checkpoint's own code never runs"
    assert caplog.messages == [expected]


@pytest.mark.parametrize("value", [1, 1.5, True, "0", [0], np.array([0, 0]), object()])
def test_any_other_value_of_a_name_of_others_is_refused(value):
    with pytest.raises(ConfigError, match="^swap_space=.*is not supported: use kv_offload_gib"):
        Config("model", swap_space=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in CONFIG_VALUES for value in CONFIG_VALUES[field]],
)
def test_values_of_vllm_are_explained(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config("model", **{field: value})
    assert str(raised.value).startswith(f"{field} must be one of ")
    assert str(raised.value).endswith(f", got {value!r}: {CONFIG_VALUES[field][value].advice}")


@pytest.mark.parametrize("method", SPECULATIVE_METHODS)
def test_methods_of_vllm_are_explained(method: str) -> None:
    assert method not in METHODS
    with pytest.raises(ConfigError) as raised:
        Config("model", speculative_config={"method": method, "model": "org/small"})
    assert str(raised.value).endswith(f", got {method!r}: {SPECULATIVE_METHODS[method].advice}")


def test_assignments_and_long_values_are_explained() -> None:
    with pytest.raises(AttributeError, match="no field 'best_of': use n"):
        SamplingParams().best_of = 2  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(best_of=["x"] * 100_000)  # type: ignore[call-arg]
    assert len(str(raised.value)) < 800


OLDER_ENGINE_ARGS = """
    task swap_space rope_scaling rope_theta calculate_kv_scales max_seq_len_to_capture
    num_scheduler_steps use_v2_block_manager device
"""
"""Options of earlier versions of vLLM; test_vllm_names.py has those of today's."""
SPECULATIVE_ARGS = """
    enforce_eager num_speculative_tokens model method draft_tensor_parallel_size quantization
    tensor_parallel_size attention_backend kv_cache_dtype max_model_len revision code_revision
    disable_by_batch_size prompt_lookup_max prompt_lookup_min speculative_token_tree
    rejection_sample_method
"""


def test_names_that_people_pass_to_vllm_are_fields_or_explained() -> None:
    for owner, names, passed in (
        (Config, CONFIG_NAMES, OLDER_ENGINE_ARGS),
        (SpeculativeConfig, SPECULATIVE_NAMES, SPECULATIVE_ARGS),
    ):
        fields = {field.name for field in dataclasses.fields(owner)}  # type: ignore[arg-type]
        assert set(passed.split()) <= fields | names.keys()
        assert not fields & names.keys()
