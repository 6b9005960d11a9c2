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


def test_auto_is_ngram() -> None:
    assert spec(method="auto") == spec(method="ngram")


@pytest.mark.parametrize("name", ["qwen3_5_mtp", "qwen3_next_mtp"])
def test_longer_names_of_mtp(name: str) -> None:
    assert spec(method=name) == spec(method="mtp")


def test_options_may_be_an_object() -> None:
    given = SpeculativeConfig(method="eagle3", model="org/head")
    assert Config("model", speculative_config=given).speculative_config is given


@pytest.mark.parametrize("method", ["draft_model", "eagle3", None])
def test_model_may_be_a_path_object(method: str | None) -> None:
    assert spec(method=method, model=Path("org") / "small").model == str(Path("org") / "small")


@pytest.mark.parametrize("value", ["ngram", 5, True, ["method"], {1: "ngram"}, ("method", "ngram")])
def test_options_must_be_a_dictionary(value: Any) -> None:
    with pytest.raises(ConfigError, match="^speculative_config must be a dictionary of options"):
        Config("model", speculative_config=value)


@pytest.mark.parametrize("options", [{}, {"method": None}, {"num_speculative_tokens": 3}])
def test_missing_method_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^speculative_config: method must be one of ngram, draft_model, eagle3, mtp, auto, "
        r"or model must name a draft network: both are missing$",
    ):
        spec(**options)


@pytest.mark.parametrize("value", ["NGRAM", "", 5, True, ["ngram"], "lookahead"])
def test_unknown_method_is_refused(value: Any) -> None:
    match = "^speculative_config: method must be one of ngram, draft_model, eagle3, mtp, auto, got "
    with pytest.raises(ConfigError, match=match):
        spec(method=value)


def test_nearest_method_is_named() -> None:
    with pytest.raises(ConfigError, match=r"got 'ngrams'; did you mean 'ngram'\?$"):
        spec(method="ngrams")


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_network_needs_a_model(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"^speculative_config: method {method} needs a model: "):
        spec(method=method)


@pytest.mark.parametrize(("method", "found"), [("ngram", "ngram"), ("auto", "ngram"), ("mtp",) * 2])
def test_other_methods_have_no_model(method: str, found: str) -> None:
    match = rf"method {found} has no model, got 'org/small': leave"
    with pytest.raises(ConfigError, match=match):
        spec(method=method, model="org/small")


@pytest.mark.parametrize("value", ["", 5, b"model", [], {"path": "x"}])
def test_model_must_be_a_path_or_an_id(value: Any) -> None:
    match = "^speculative_config: model must be a directory or a hub id, got "
    with pytest.raises(ConfigError, match=match):
        spec(method="draft_model", model=value)


@pytest.mark.parametrize(
    "name", ["num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"]
)
@pytest.mark.parametrize("value", [0, -1, 1.0, "3", True, [2], np.float64(2.0), 10**7])
def test_counts_must_be_positive_integers(name: str, value: Any) -> None:
    match = f"^speculative_config: {name} must be an integer from 1 to [0-9]+, got "
    with pytest.raises(ConfigError, match=match):
        spec(method="ngram", **{name: value})


def test_lookup_sizes_are_never_none() -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_max must be .* from 1 to 128, got None"):
        spec(method="ngram", prompt_lookup_max=None)


def test_numpy_integers_become_int() -> None:
    found = spec(method="ngram", num_speculative_tokens=np.int64(3), prompt_lookup_max=np.uint8(7))
    assert (type(found.num_speculative_tokens), type(found.prompt_lookup_max)) == (int, int)


def test_shortest_lookup_may_not_exceed_the_longest() -> None:
    assert spec(method="ngram", prompt_lookup_min=4).prompt_lookup_min == 4
    for options in ({"prompt_lookup_min": 5}, {"prompt_lookup_max": 1}):
        match = "^speculative_config: prompt_lookup_min must be at most prompt_lookup_max, got "
        with pytest.raises(ConfigError, match=match):
            spec(method="ngram", **options)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("num_speculativ_tokens", "num_speculative_tokens"),
        ("prompt_lookup_maximum", "prompt_lookup_max"),
        ("metod", "method"),
    ],
)
def test_unknown_key_is_refused_and_the_nearest_named(typo: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"no field '{typo}'; did you mean '{nearest}'\?"):
        spec(method="ngram", **{typo: 1})


def test_config_with_speculation_survives_pickle_copy_and_replace() -> None:
    config = Config("model", speculative_config={"method": "ngram", "prompt_lookup_max": 6})
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert dataclasses.replace(config, seed=1).speculative_config == config.speculative_config
    assert hash(config) == hash(copy.deepcopy(config))


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec(method="ngram").method = "eagle3"  # type: ignore[misc]


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
