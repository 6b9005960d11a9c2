"""Sampling parameters: what is accepted, what is refused and what the refusal says."""

import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.sampling_params import SamplingParams

BEYOND_FLOAT = pytest.param(10**400, id="integer beyond the floats")


def test_defaults_equal_nano_vllms():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)
    assert params.seed is None


def test_first_three_fields_in_nano_vllms_order():
    assert SamplingParams(0.5, 7, True) == SamplingParams(
        temperature=0.5, max_tokens=7, ignore_eos=True
    )


@pytest.mark.parametrize("value", [0, -1, True, False, 1.5, 2.0, "3", None, [1], np.float64(2.0)])
def test_max_tokens_must_be_a_positive_integer(value):
    with pytest.raises(InvalidRequestError, match="^max_tokens must be an integer >= 1, got "):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.tensor(2.5)])
def test_max_tokens_that_looks_like_an_integer_and_is_none(value):
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_other_libraries_integers_become_int(value):
    params = SamplingParams(max_tokens=value, seed=value)
    assert params.max_tokens == params.seed == 3
    assert type(params.max_tokens) is type(params.seed) is int


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        -0.1,
        -1,
        True,
        "0.7",
        None,
        1j,
        [0.5],
        BEYOND_FLOAT,
    ],
)
def test_temperature_must_be_finite_and_not_negative(value):
    with pytest.raises(
        InvalidRequestError, match="^temperature must be a finite number >= 0, got "
    ):
        SamplingParams(temperature=value)


@pytest.mark.parametrize(
    "value", [0, 1, 1e-300, 100.0, np.float32(0.5), np.int64(2), Fraction(1, 4)]
)
def test_temperature_becomes_float(value):
    temperature = SamplingParams(temperature=value).temperature
    assert temperature == value
    assert type(temperature) is float


@pytest.mark.parametrize("value", [-1, 2**63, 0.5, True, "1"])
def test_seed_out_of_range_or_no_integer(value):
    with pytest.raises(InvalidRequestError, match="^seed must be an integer from 0 to 92233"):
        SamplingParams(seed=value)


@pytest.mark.parametrize("value", [0, 2**63 - 1])
def test_seeds_at_the_ends_of_the_range(value):
    assert SamplingParams(seed=value).seed == value


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_ignore_eos_must_be_true_or_false(value):
    with pytest.raises(InvalidRequestError, match="^ignore_eos must be True or False, got "):
        SamplingParams(ignore_eos=value)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("eos", "ignore_eos")],
)
def test_unknown_keyword_is_refused_and_the_nearest_named(typo, nearest):
    with pytest.raises(InvalidRequestError, match=f"'{typo}'; did you mean '{nearest}'"):
        SamplingParams(**{typo: 1})


def test_errors_are_value_errors_and_of_our_hierarchy():
    with pytest.raises(ValueError, match="max_tokens") as raised:
        SamplingParams(max_tokens=0)
    assert isinstance(raised.value, NanoVLLMError)


def test_frozen_hashable_and_picklable():
    params = SamplingParams(temperature=0.3, seed=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert len({params, SamplingParams(temperature=0.3, seed=4)}) == 1
    assert pickle.loads(pickle.dumps(params)) == params
