"""Options of other engines: accepted where nothing changes, and else refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm import demo_model
from nanovllm.errors import ConfigError, InvalidRequestError, NanoVLLMError
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.options.config import Config
from nanovllm.options.other_names import OTHER_NAMES, REMEDIES
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.speculative_config import SpeculativeConfig
from nanovllm.options.structured_outputs import StructuredOutputsParams

OWNERS: list[tuple[Any, dict[str, Any]]] = [
    (Config, {"model": "model"}),
    (SpeculativeConfig, {"method": "ngram"}),
    (SamplingParams, {"temperature": 0.5}),
    (PoolingParams, {}),
    (StructuredOutputsParams, {"regex": "a"}),
]
"""Each class, and arguments of it."""


@pytest.mark.parametrize(("owner", "given"), OWNERS)
def test_names_are_accepted_where_nothing_changes_and_else_refused(
    owner: Any, given: dict[str, Any]
) -> None:
    made = owner(**given)
    for name, other in OTHER_NAMES.get(owner.__name__, {}).items():
        is_any = ... in other.accepted
        for value in (None, *((5, "text") if is_any else other.accepted)):
            assert owner(**given, **{name: value}) == made
        if is_any:
            continue
        with pytest.raises(NanoVLLMError) as raised:
            owner(**given, **{name: "something else"})
        if other.remedy:
            expected = f"{name}='something else' is not supported: {other.remedy}"
            assert str(raised.value) == expected
        else:
            assert str(raised.value).startswith(f"{owner.__name__} has no field {name!r}; ")


def test_no_name_is_a_field() -> None:
    for owner, _ in OWNERS:
        assert owner.__dataclass_fields__.keys().isdisjoint(OTHER_NAMES.get(owner.__name__, ()))


def test_errors_of_speculation_name_the_option() -> None:
    with pytest.raises(ConfigError, match="^speculative_config: .* has no field 'revision'"):
        Config("model", speculative_config={"method": "ngram", "revision": "v1"})


def test_code_of_a_checkpoint_is_not_run_whatever_is_trusted(caplog):
    caplog.set_level("INFO", "nanovllm")
    assert Config("model", trust_remote_code=True) == Config("model")
    assert caplog.messages == ["trust_remote_code=True changes nothing"]


@pytest.mark.parametrize("value", [1, 1.5, True, "0", [0], np.array([0, 0]), object()])
def test_any_other_value_of_a_name_of_others_is_refused(value):
    with pytest.raises(ConfigError, match="^swap_space=.*is not supported: use kv_offload_gib"):
        Config("model", swap_space=value)


def test_values_of_vllm_have_their_remedy() -> None:
    for name, remedy in REMEDIES.items():
        field, is_value, value = name.partition("=")
        if is_value:
            options = {field: value}
            if field == "method":
                options = {"speculative_config": {"method": value, "model": "org/small"}}
            with pytest.raises(ConfigError) as raised:
                Config("model", **options)
            assert f"{field} must be one of " in str(raised.value)
            assert str(raised.value).endswith(f", got {value!r}: {remedy}")


def test_assignments_and_long_values_are_explained() -> None:
    with pytest.raises(AttributeError, match="no field 'best_of': use n"):
        SamplingParams().best_of = 2  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no field 'top_logprobs'; known: "):
        SamplingParams().top_logprobs = 2  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(best_of=["x"] * 100_000)  # type: ignore[call-arg]
    assert len(str(raised.value)) < 800


def test_the_table_is_short_and_hides_nothing() -> None:
    assert len({*REMEDIES.values()}) + sum(map(len, OTHER_NAMES.values())) <= 160
    pytest.importorskip("fastapi")
    from nanovllm.apps.server.app import ROUTERS

    here = {route.path for router in ROUTERS for route in router.routes}
    assert here.isdisjoint(REMEDIES)


def test_a_tag_in_text_is_a_grammar() -> None:
    """structural_tag's remedy."""
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tag = llguidance.StructTag(trigger="<call", begin="<call=f>", grammar=schema, end="</call>")
    grammar = llguidance.StructTag.to_grammar([tag], assume_special=False)
    text = (Path(demo_model.MODEL) / "tokenizer.json").read_text("utf-8")
    compiler = GrammarCompiler(lambda: text, 1024, (0,))
    matcher = compiler.matcher(StructuredOutputsParams(grammar=grammar))
    tokenizer = compiler._make_tokenizer()[0]
    for output, fits in (('Hi <call=f>{"a": 1}</call> x', True), ('<call=f>{"b": 1}', False)):
        tokens = tokenizer.greedy_tokenize(output)
        assert (matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) == fits
