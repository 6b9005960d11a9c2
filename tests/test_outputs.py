"""A request's output reads like nano-vllm's dictionaries and like vLLM's objects."""

import copy
import dataclasses
import json
import pickle

import pytest

from nanovllm.outputs import CompletionOutput, DraftCounts, RequestMetrics, RequestOutput


@pytest.fixture
def output():
    completion = CompletionOutput(0, " world", [7, 8], "stop")
    return RequestOutput(
        request_id=3,
        prompt="hello",
        prompt_token_ids=[1, 2],
        outputs=[completion],
        finished=True,
        num_cached_tokens=16,
        metrics=RequestMetrics(10.0, 10.5, 11.0, 12.0, num_output_tokens=5),
    )


def test_output_is_nano_vllms_dictionary_and_vllms_object(output):
    expected = {
        "text": " world",
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "prompt": "hello",
        "prompt_token_ids": [1, 2],
        "num_cached_tokens": 16,
        "request_id": 3,
    }
    assert dict(output) == expected
    assert {**output} == expected
    assert json.loads(json.dumps([output])) == [expected]
    assert json.loads(json.dumps(output, indent=1)) == expected
    assert dict(output.items()) == expected
    assert list(output.values()) == list(expected.values())
    assert (output.get("text"), output.get("logprobs"), output.get("x", 1)) == (" world", None, 1)
    assert (len(output), list(output)) == (7, list(output.keys()))
    assert "text" in output
    assert "logprobs" not in output
    first = output.outputs[0]
    assert (output["text"], output["token_ids"]) == (first.text, first.token_ids)
    assert (output.text, output.token_ids, output.finish_reason) == (" world", [7, 8], "stop")
    assert all(getattr(output, name) == value for name, value in expected.items())


@pytest.mark.parametrize("name", ["logprobs", "cumulative_logprob", "stop_reason"])
def test_what_a_continuation_has_is_named(output, name):
    with pytest.raises(KeyError, match=rf"use output\.outputs\[0\]\.{name}"):
        output[name]
    with pytest.raises(AttributeError, match=rf"use output\.outputs\[0\]\.{name}"):
        getattr(output, name)


def test_outputs_that_differ_only_beside_the_dictionary_are_not_equal(output):
    other = dataclasses.replace(output, weight_version=7)
    assert output != other
    assert not output == other  # noqa: SIM201  # both operators are compared
    assert copy.deepcopy(output) == output
    assert not output != copy.copy(output)  # noqa: SIM202


@pytest.mark.parametrize("key", ["logprobs", "keys", "outputs", "__class__", 0])
def test_unknown_key_is_named_with_the_known_ones(output, key):
    with pytest.raises(KeyError) as raised:
        output[key]
    message = raised.value.args[0]
    assert repr(key) in message
    assert "a RequestOutput has text, token_ids, finish_reason" in message


def test_output_is_frozen_and_picklable(output):
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.prompt = "other"
    assert pickle.loads(pickle.dumps(output)) == output


def test_metrics_are_differences_of_times(output):
    assert output.metrics.queue_time == 0.5
    assert output.metrics.time_to_first_token == 1.0
    assert output.metrics.time_per_output_token == 0.25
    assert RequestMetrics(10.0).time_to_first_token is None
    assert RequestMetrics(10.0, 10.5, 11.0, 11.0, 1).time_per_output_token is None


def test_draft_counts_by_position() -> None:
    counts = DraftCounts()
    for num_proposed, num_accepted in ((3, 1), (0, 0), (2, 2), (1, 0)):
        counts.add(num_proposed, num_accepted)
    assert counts == DraftCounts(3, 6, 3, [2, 1, 0])
    assert counts.mean_acceptance_length == 2
    assert DraftCounts().mean_acceptance_length == 1


def test_sum_of_draft_counts_is_a_new_object() -> None:
    first, second = DraftCounts(1, 1, 1, [1]), DraftCounts(2, 5, 3, [2, 1, 0])
    found = first + second
    assert found == second + first == DraftCounts(3, 6, 4, [3, 1, 0])
    found.add(1, 1)
    assert (first, second) == (DraftCounts(1, 1, 1, [1]), DraftCounts(2, 5, 3, [2, 1, 0]))
    alone = first + DraftCounts()
    alone.add(1, 1)
    assert first == DraftCounts(1, 1, 1, [1])
