"""Sampling parameters that a checkpoint recommends in its generation_config.json."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.options.sampling_params import default_sampling_params
from tests.checkpoints import copy_checkpoint
from tests.glossary import OPTIONS


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None, "max_new_tokens": None}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
        ({"temperature": 0.0}, {"temperature": 0}),
        ({"top_k": 0, "min_p": 0.0}, {}),
        (
            {"min_p": 0.1, "repetition_penalty": 1.2, "max_new_tokens": 300},
            {"min_p": 0.1, "repetition_penalty": 1.2, "max_tokens": 300},
        ),
        ({"num_beams": 4, "bos_token_id": 1, "max_length": 20}, {}),
    ],
    ids=str,
)
def test_default_sampling_params_by_generation_config(
    recommended: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert default_sampling_params(recommended) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_k", -3),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", float("inf")),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("max_new_tokens", -1),
        ("do_sample", "no"),
    ],
)
def test_an_invalid_recommendation_is_the_checkpoints_error(field: str, value: Any) -> None:
    shown = "max_tokens" if field == "max_new_tokens" else field
    with pytest.raises(
        CheckpointError, match=rf"generation_config\.json: {shown} must be"
    ) as raised:
        default_sampling_params({field: value})
    assert len(str(raised.value)) < 250


def test_default_sampling_params_come_from_generation_config(
    demo_llm: LLM, make_llm: Any, tmp_path: Path
) -> None:
    assert demo_llm.get_default_sampling_params() == SamplingParams(temperature=0)
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    more = {"repetition_penalty": 1.1, "max_new_tokens": 99, "eos_token_id": [1021, 1019]}
    recommended = {**given, **more, "transformers_version": "5.0"}
    model = copy_checkpoint(demo_model.MODEL, tmp_path, generation_config=recommended)
    assert make_llm(model, **OPTIONS).get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, max_tokens=99
    )
    (tmp_path / "generation_config.json").unlink()
    assert make_llm(model, **OPTIONS).get_default_sampling_params() == SamplingParams()


def test_an_option_overrides_single_recommendations(
    make_llm: Any, random_model: str, tmp_path: Path
) -> None:
    recommended = {"do_sample": False, "top_k": 20, "top_p": 0.95}
    model = copy_checkpoint(random_model, tmp_path, generation_config=recommended)
    own = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 9}
    found = make_llm(model, override_generation_config=own).get_default_sampling_params()
    assert found == SamplingParams(temperature=0.7, top_k=5, top_p=0.95, max_tokens=9)
    options = {"generation_config": "vllm", "override_generation_config": own}
    found = make_llm(model, **options).get_default_sampling_params()
    assert found == SamplingParams(temperature=0.7, top_k=5, max_tokens=9)
    for wrong, message in (
        ({"max_tokens": 9}, "has no field 'max_tokens'"),
        ({"top_p": 2}, "override_generation_config: top_p must be"),
        ({"do_sample": "no"}, "override_generation_config: do_sample must be True or False"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(model, override_generation_config=wrong)
