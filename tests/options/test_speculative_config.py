"""Options of speculation: the values accepted, the values refused, and the error messages."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.speculative_config import SpeculativeConfig


def spec(**options: Any) -> SpeculativeConfig:
    """Return what `Config` makes of the options."""
    found = Config("model", speculative_config=options).speculative_config
    assert isinstance(found, SpeculativeConfig)
    return found


def test_defaults() -> None:
    assert dataclasses.asdict(spec(method="ngram")) == {
        "method": "ngram",
        "model": None,
        "num_speculative_tokens": None,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    assert spec(method="ngram").max_draft_tokens == 24
    assert spec(model="org/small").max_draft_tokens == 8
    assert spec(method="mtp").max_draft_tokens == 1
    assert spec(method="ngram", num_speculative_tokens=3).max_draft_tokens == 3


def test_other_names_of_methods() -> None:
    assert spec(method="auto") == spec(method="ngram")
    assert spec(method="qwen3_5_mtp") == spec(method="qwen3_next_mtp") == spec(method="mtp")


def test_options_may_be_an_object() -> None:
    given = SpeculativeConfig(method="eagle3", model="org/head")
    assert Config("model", speculative_config=given).speculative_config is given


@pytest.mark.parametrize("method", ["draft_model", "eagle3", None])
def test_model_may_be_a_path_object(method: str | None) -> None:
    assert spec(method=method, model=Path("org") / "small").model == str(Path("org") / "small")


METHODS = "method must be one of ngram, draft_model, eagle3, mtp, auto"
COUNTS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
REFUSED: list[tuple[dict[str, Any], str]] = [
    *((each, f"{METHODS}, or model must name") for each in ({}, {"num_speculative_tokens": 3})),
    *(({"method": value}, f"{METHODS}, got ") for value in ("NGRAM", "", 5, ["ngram"], "look")),
    ({"method": "ngrams"}, f"{METHODS}, got 'ngrams'; did you mean 'ngram'\\?$"),
    *(({"method": name}, f"method {name} needs a model: ") for name in ("draft_model", "eagle3")),
    ({"method": "auto", "model": "org/small"}, "method ngram has no model, got 'org/small': leave"),
    ({"method": "mtp", "model": "org/small"}, "method mtp has no model, got 'org/small': leave"),
    *(
        ({"method": "draft_model", "model": value}, "model must be a directory or a hub id, got ")
        for value in ("", 5, b"model", [])
    ),
    *(
        ({"method": "ngram", name: value}, f"{name} must be an integer from 1 to [0-9]+, got ")
        for name in COUNTS
        for value in (0, 1.0, True, 10**7)
    ),
    ({"method": "ngram", "prompt_lookup_max": None}, "prompt_lookup_max must be .* got None"),
    ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min must be at most prompt_look"),
    ({"method": "ngram", "prompt_lookup_max": 1}, "prompt_lookup_min must be at most prompt_look"),
    ({"metod": "ngram"}, r".*no field 'metod'; did you mean 'method'\?"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^speculative_config: {message}"):
        spec(**options)


@pytest.mark.parametrize("value", ["ngram", 5, True, ["method"], {1: "ngram"}, ("method", "ngram")])
def test_options_must_be_a_dictionary(value: Any) -> None:
    with pytest.raises(ConfigError, match="^speculative_config must be a dictionary of options"):
        Config("model", speculative_config=value)


def test_numpy_integers_become_int() -> None:
    found = spec(method="ngram", num_speculative_tokens=np.int64(3), prompt_lookup_min=4)
    assert (type(found.num_speculative_tokens), found.prompt_lookup_min) == (int, 4)


def test_config_with_speculation_survives_pickle_copy_and_replace() -> None:
    config = Config("model", speculative_config={"method": "ngram", "prompt_lookup_max": 6})
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert dataclasses.replace(config, seed=1).speculative_config == config.speculative_config
    assert hash(config) == hash(copy.deepcopy(config))


HEADS: list[dict[str, Any]] = [
    {"architectures": ["LlamaForCausalLMEagle3"]},
    {"architectures": ["Eagle3LlamaForCausalLM"]},
    {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
    {"speculators_model_type": "eagle3"},
]


@pytest.mark.parametrize("config", HEADS)
def test_method_of_a_head_is_found(config: dict[str, Any]) -> None:
    assert spec(model="org/head").for_network(config).method == "eagle3"
    given = spec(method="eagle3", model="org/head", num_speculative_tokens=3)
    assert given.for_network(config) == given
    with pytest.raises(ConfigError, match="'org/head' is an EAGLE-3 head: use method eagle3"):
        spec(method="draft_model", model="org/head").for_network(config)


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], [], None, "eagle3", [5]])
def test_method_of_a_draft_model_is_found(names: Any) -> None:
    config = {"architectures": names}
    found = spec(model="org/small").for_network(config)
    assert found == spec(method="draft_model", model="org/small")
    # Whether it is a head after all, the reader of its config.json says.
    assert spec(method="eagle3", model="org/small").for_network(config).method == "eagle3"
