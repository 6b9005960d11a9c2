"""Sampling parameters: the values accepted, the values refused, and the error messages."""

import dataclasses
import enum
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from nanovllm.engine.input_checks import ParamsCheck
from nanovllm.engine.prompt import make_prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.options.config import Config
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams, takes_prompt
from nanovllm.options.structured_outputs import StructuredOutputsParams
from nanovllm.options.validation import did_you_mean, shown


def test_defaults_and_order_equal_nano_vllms():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)
    assert params.seed is None
    given = SamplingParams(temperature=0.5, max_tokens=7, ignore_eos=True)
    assert SamplingParams(0.5, 7, True) == given


def test_what_asks_for_nothing_is_taken_as_in_vllm():
    assert SamplingParams(seed=-1) == SamplingParams(top_k=-1) == SamplingParams()
    params = SamplingParams(max_tokens=None, min_tokens=7)  # as many as there is room for
    assert params.clone(top_p=0.5).max_tokens == params.max_tokens == 2**31 - 1


def forbid_nothing(token_ids, logits):
    return logits


EVERY_FIELD = {
    "temperature": 0.3,
    "max_tokens": 9,
    "ignore_eos": True,
    "seed": 4,
    "n": 2,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "min_tokens": 3,
    "stop": ["\n", "END"],
    "stop_token_ids": [5, 6],
    "include_stop_str_in_output": True,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.5, 4: -2.0},
    "allowed_token_ids": [3, 4, 5],
    "bad_words": ["never"],
    "logits_processors": [forbid_nothing],
    "extra_args": {"no_digits": True},
    "structured_outputs": StructuredOutputsParams(choice=("yes", "no")),
    "logprobs": 3,
    "prompt_logprobs": 0,
    "prompt_logprob_start": 5,
    "truncate_prompt_tokens": 12,
    "detokenize": True,
    "skip_special_tokens": False,
    "kept_token_ids": [7, 8],
    "marks_kept_tokens": True,
    "spaces_between_special_tokens": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
}


@pytest.mark.parametrize("options", [{"temperature": 0.3, "seed": 4}, EVERY_FIELD], ids=len)
def test_params_are_frozen_hashable_and_picklable(options):
    params = SamplingParams(**options)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert len({params, SamplingParams(**options)}) == 1
    assert pickle.loads(pickle.dumps(params)) == params
    assert params != SamplingParams()


def test_every_field_is_kept():
    params = SamplingParams(**EVERY_FIELD)
    assert list(EVERY_FIELD) == [field.name for field in dataclasses.fields(SamplingParams)]
    for name, value in EVERY_FIELD.items():
        if isinstance(value, list):
            value = tuple(value)
        assert getattr(params, name) == value
    assert params.clone(top_k=7) == SamplingParams(**{**EVERY_FIELD, "top_k": 7})
    with pytest.raises(InvalidRequestError, match="^top_k must be"):
        params.clone(top_k=-7)
    for name in ("topk", "self", "args"):  # Python's own names are names like others
        with pytest.raises(InvalidRequestError, match=f"no field '{name}'"):
            SamplingParams(**{name: 7})


def test_params_copy_the_collections_given():
    stop, allowed, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, allowed_token_ids=allowed, logit_bias=bias)
    stop.append("b")
    allowed.append(2)
    bias[2] = 3.0
    assert params == SamplingParams(stop="a", allowed_token_ids=[1], logit_bias={1: 2.0})


NO_INTEGERS = [True, 1.5, 2.0, "3", [1], np.float64(2.0), np.array([1, 2]), torch.tensor(2.5)]
NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), True, "0.7", 1j, [0.5], 10**400]
FLAGS = (
    *("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"),
    *("marks_kept_tokens", "spaces_between_special_tokens"),
)


@pytest.mark.parametrize(
    ("name", "rule", "values"),
    [
        ("max_tokens", "an integer from 1 to 2147483647", [0, -1, *NO_INTEGERS]),
        ("temperature", "a finite number >= 0", [-0.1, -1, None, *NO_NUMBERS]),
        ("seed", "an integer from -922337203685477", [-(2**63) - 1, 2**63, 0.5, True, "1"]),
        ("n", "an integer from 1 to 16384", [0, 16385, None, 1.0]),
        ("top_k", "an integer >= -1", [-2, None, 5.0]),
        ("top_p", "from 0 to 1", [-0.1, 1.0001, None, *NO_NUMBERS]),
        ("min_p", "from 0 to 1", [-0.1, 1.0001, None]),
        ("min_tokens", "an integer from 0 to 64", [-1, 65, None]),
        ("presence_penalty", "from -2 to 2", [-2.01, 2.01, None]),
        ("frequency_penalty", "from -2 to 2", [-2.01, 2.01, None]),
        ("repetition_penalty", "a finite number >= 0", [-0.1, None, *NO_NUMBERS]),
        ("logprobs", "an integer >= -1", [-2, True]),
        ("prompt_logprobs", "an integer >= -1", [-2, False]),
        ("prompt_logprob_start", "an integer >= 0", [-1, None]),
        ("truncate_prompt_tokens", "an integer >= -1", [-2, [3]]),
        *((name, "True or False", [0, 1, None, "no"]) for name in FLAGS),
        ("output_kind", "a RequestOutputKind", [0, 1, "DELTA"]),
    ],
)
def test_refusal_names_the_field_its_range_and_the_value(name, rule, values):
    for value in values:
        with pytest.raises(InvalidRequestError) as raised:
            SamplingParams(**{name: value})
        assert str(raised.value).startswith(f"{name} must be {rule}")
        assert f", got {shown(value)}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seed", [-(2**63), 0, 2**63 - 1]),
        ("temperature", [0, 1e-300, 100.0]),
        ("n", [1, 16384]),
        ("top_k", [0, 1, 10**9]),
        ("top_p", [1e-9, 0.5, 1, 1.0]),
        ("min_p", [0, 0.5, 1]),
        ("min_tokens", [0, 1, 64]),
        ("presence_penalty", [-2, 0.5, 2]),
        ("frequency_penalty", [-2.0, 0, 2]),
        ("repetition_penalty", [1e-3, 1, 10]),
        ("logprobs", [None, -1, 0, 10**6]),
        ("prompt_logprobs", [None, -1, 0, 10**6]),
        ("truncate_prompt_tokens", [None, -1, 1, 10**6]),
        ("output_kind", [None, *RequestOutputKind]),
    ],
)
def test_values_at_the_ends_of_each_range_are_accepted(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_what_refuses_zero():
    with pytest.raises(InvalidRequestError, match="^top_p must be above 0 and at most 1, got 0"):
        SamplingParams(top_p=0)
    with pytest.raises(InvalidRequestError, match="^repetition_penalty must be above 0, got 0"):
        SamplingParams(repetition_penalty=0.0)
    with pytest.raises(InvalidRequestError, match="^truncate_prompt_tokens must be above 0, or -1"):
        SamplingParams(truncate_prompt_tokens=0)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", np.int64(2), 2.0),
        ("seed", np.uint8(3), 3),
        ("top_p", Fraction(1, 4), 0.25),
        ("top_p", 1, 1.0),
        ("top_k", np.int32(5), 5),
        ("n", torch.tensor(3), 3),
        ("min_tokens", np.int64(2), 2),
    ],
)
def test_numbers_of_other_libraries_become_python_numbers(name, value, expected):
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


def test_min_tokens_must_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(
        InvalidRequestError, match="^min_tokens must be an integer from 0 to 5, got"
    ):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_may_be_given_alone_or_in_a_list(name):
    for value, expected in (
        ("one", ("one",)),
        (["one"], ("one",)),
        (["one", "two"], ("one", "two")),
        (("one", "two"), ("one", "two")),
        ([], ()),
        (None, ()),
    ):
        assert getattr(SamplingParams(**{name: value}), name) == expected
    for value in (5, [5], ["one", 5], [None], b"one", {"one": 1}, {"one"}, [["one"]]):
        with pytest.raises(InvalidRequestError) as raised:
            SamplingParams(**{name: value})
        assert str(raised.value).startswith(f"{name} must be a string or a list of strings, got")
        assert repr(value) in str(raised.value)
    for value in ("", [""], ["one", ""]):
        with pytest.raises(
            InvalidRequestError, match=f"^{name} must not hold an empty string, got"
        ):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_must_be_a_list_of_ids(name):
    for value in ([0], (5, 6, 5), [2**31 - 1], [np.int64(7)]):
        found = getattr(SamplingParams(**{name: value}), name)
        assert found == tuple(value)
        assert {type(token) for token in found} == {int}
    for value in (0, 5, "12", b"12", {1, 2}, {1: 2}, np.array([1, 2]), torch.tensor([1, 2]), False):
        with pytest.raises(InvalidRequestError, match=f"^{name} must be a list of token ids, got"):
            SamplingParams(**{name: value})
    for wrong in (-1, 2**31, 1.0, True, None, "1"):
        with pytest.raises(InvalidRequestError) as raised:
            SamplingParams(**{name: [3, wrong]})
        rule = f"{name}[1] must be an integer from 0 to 2147483647, got {wrong!r}"
        assert str(raised.value).startswith(rule)


def test_empty_token_ids_mean_none_or_are_refused():
    assert SamplingParams(stop_token_ids=[]) == SamplingParams(stop_token_ids=None)
    assert SamplingParams(allowed_token_ids=None) == SamplingParams()
    with pytest.raises(InvalidRequestError, match="^allowed_token_ids is empty"):
        SamplingParams(allowed_token_ids=[])


@pytest.mark.parametrize(
    "value", [{5: 1.5, 8: -3}, {"5": 1.5, "8": -3}, {np.int64(5): 1.5, 8: -3}, [(5, 1.5), (8, -3)]]
)
def test_logit_bias_takes_token_ids_as_integers_or_digits(value):
    params = SamplingParams(logit_bias=value)
    assert params == SamplingParams(logit_bias={5: 1.5, 8: -3.0})
    assert params.logit_bias == {5: 1.5, 8: -3.0}
    kinds = [(type(token), type(bias)) for token, bias in params.logit_bias.items()]
    assert kinds == [(int, float)] * 2
    clamped = SamplingParams(logit_bias={1: 1e9, 2: -1e9, 3: 99.5}).logit_bias
    assert clamped == {1: 100.0, 2: -100.0, 3: 99.5}
    assert not any(SamplingParams(logit_bias=empty).has_rules for empty in (None, {}, [], ()))


def test_dictionaries_are_read_as_they_were_given():
    """Symptom: `params.extra_args["x"]` of a script for vLLM is a TypeError."""
    assert SamplingParams().extra_args is SamplingParams().logit_bias is None
    params = SamplingParams(extra_args={"x": 1}, logit_bias={"5": 1})
    assert (params.extra_args, params.logit_bias) == ({"x": 1}, {5: 1.0})
    assert dataclasses.asdict(params)["extra_args"]["x"] == params.clone(n=2).extra_args["x"] == 1
    check = ParamsCheck(has_tokenizer=True, vocab_size=10).check
    biased = params.clone(extra_args=None)
    checked = check(biased)
    biased.logit_bias[-1] = 1.0  # an index of no token, which a worker must not see
    assert checked.logit_bias == {5: 1.0}
    with pytest.raises(InvalidRequestError, match="^logit_bias token must be an integer from 0"):
        check(biased)


NO_TOKENS = [-1, "-1", "1.0", "one", "", "²", "9" * 5000, 1.0, True, None, 2**31]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *(({token: 1.0}, "logit_bias token must be an integer from 0 to") for token in NO_TOKENS),
        *(
            ({5: bias}, r"logit_bias\[5\] must be a finite number")
            for bias in (float("nan"), float("inf"), -float("inf"), "1", None, True)
        ),
        *(
            (value, "logit_bias must be a dictionary of token id to")
            for value in (5, 0.5, "ab c", [5], [(1, 2, 3)], {1, 2})
        ),
    ],
)
def test_a_logit_bias_that_is_refused(value, message):
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        SamplingParams(logit_bias=value)


def test_stop_strings_need_detokenize():
    with pytest.raises(InvalidRequestError, match="stop strings need detokenize=True"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop_token_ids == (1,)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1, False)]
)
def test_temperatures_below_1e_5_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy == greedy


class Processor:
    """A callable object with an unusual signature; vLLM counts three parameters too."""

    def __call__(self, token_ids, logits, scale=1.0):
        return logits * scale


@pytest.mark.parametrize(
    ("processor", "three"),
    [
        (forbid_nothing, False),
        (lambda prompt, output, logits: logits, True),
        (lambda *arguments: arguments[-1], False),
        (Processor(), True),
        (max, False),
    ],
)
def test_logits_processors_take_two_or_three_arguments(processor, three):
    for value in ([processor], (processor,)):
        assert SamplingParams(logits_processors=value).logits_processors == (processor,)
    assert takes_prompt(processor) == three


@pytest.mark.parametrize("value", [5, "f", forbid_nothing, [None], ["f"], {forbid_nothing: 1}, [3]])
def test_logits_processors_must_be_a_list_of_functions(value):
    with pytest.raises(InvalidRequestError, match="^logits_processors must be a list of functions"):
        SamplingParams(logits_processors=value)


@pytest.mark.parametrize("processor", [lambda: 0, lambda one: 0, lambda a, b, c, d: 0])
def test_logits_processors_with_other_signatures_are_refused(processor):
    with pytest.raises(InvalidRequestError, match=r"must take \(output_token_ids, logits\) or"):
        SamplingParams(logits_processors=[processor])


def test_did_you_mean_suggests_no_other_meaning():
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in ("length_penalty", "max_p", "top_n", "mix_tokens", "tokens", "prefill", "best_of"):
        assert did_you_mean(name, names).startswith("; known: allowed_token_ids, bad_words")
    meant = did_you_mean("stop", ("stop_sequences", "top_k", "top_p"))
    assert meant == "; did you mean 'stop_sequences'?"


@given(st.data())
def test_did_you_mean_finds_each_misspelt_field(data):
    """One letter left out, doubled, replaced, or exchanged with the next."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    name = data.draw(
        st.sampled_from([n for n in names if min(map(len, n.split("_"))) > 3]), label="field"
    )
    place = data.draw(st.integers(0, len(name) - 1), label="place of the typo")
    before, letter, after = name[:place], name[place], name[place + 1 :]
    typo = data.draw(
        st.sampled_from(
            [
                before + after,
                before + letter + letter + after,
                f"{before}q{after}",
                before + after[:1] + letter + after[1:],
            ]
        ),
        label="typo",
    )
    if typo not in names and not typo.startswith("_"):
        assert did_you_mean(typo, names) == f"; did you mean {name!r}?"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SamplingParams(bad_words=["word"] * 100_000 + [b"bytes"]),
        lambda: SamplingParams(stop_token_ids={*range(100_000)}),
        lambda: SamplingParams(logit_bias={"x" * 100_000: 1}),
        lambda: SamplingParams(temperature="x" * 100_000),
        lambda: SamplingParams(max_tokens=-(10**5000)),
        lambda: SamplingParams(**{"x" * 100_000: 1}),
    ],
)
def test_messages_are_short_whatever_the_value(wrong):
    with pytest.raises(InvalidRequestError) as raised:
        wrong()
    assert len(str(raised.value)) < 800


def test_an_assignment_to_parameters_says_how_to_copy_them():
    params = SamplingParams()
    for name, value, message in (
        ("max_tokens", 20, r"another max_tokens use x = x\.clone\(max_tokens=20\)"),
        ("max_token", 2, "did you mean 'max_tokens'"),
    ):
        with pytest.raises(AttributeError, match=message):
            setattr(params, name, value)
    with pytest.raises(AttributeError, match=r"x = dataclasses\.replace\(x, seed=1\)"):
        Config("model").seed = 1


def test_parameters_hold_plain_values_only():
    """Symptom: other processes have no class of a notebook, and an engine of two ranks ended."""

    class Color(str, enum.Enum):  # noqa: UP042 (str() of a StrEnum is its value)
        RED = "red"
        BLUE = "blue"

    class Number(int):
        pass

    class Share(float):
        pass

    class Text(str):
        def __str__(self):
            return "another text"

    class OwnParams(SamplingParams):
        pass

    forms = [
        {"choice": list(Color)},
        {"regex": Text("[ab]")},
        {"json": {Text("type"): Text("object")}},
        type("OwnForm", (StructuredOutputsParams,), {})(regex="[ab]"),
    ]
    for form in forms:
        own = OwnParams(
            temperature=Share(0.5),
            top_k=Number(3),
            top_p=Share(0.9),
            max_tokens=Number(4),
            seed=Number(5),
            stop=[Text("stop"), Color.RED],
            bad_words=Text("bad"),
            stop_token_ids=[Number(1)],
            allowed_token_ids=[Number(2)],
            logit_bias={Number(3): Share(1.0)},
            logprobs=Number(1),
            structured_outputs=form,
        )
        params = ParamsCheck(has_tokenizer=True, vocab_size=10).check(own)
        assert type(params) is SamplingParams
        assert pickle.loads(pickle.dumps(params)) == params
        assert (*params.stop, *params.bad_words) == ("stop", "red", "bad")
        assert "another text" not in repr(params)
    assert SamplingParams(structured_outputs=forms[0]).structured_outputs.choice == ("red", "blue")
    assert make_prompt(Color.BLUE).text == "blue"
    assert pickle.dumps(make_prompt({"prompt": Text("a")}).text)
