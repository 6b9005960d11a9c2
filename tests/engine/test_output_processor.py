"""`OutputProcessor`: what a token costs, and which output has what. Tokens come from no engine."""

import time
import tracemalloc
from typing import Any

import pytest
from transformers import AutoTokenizer

from nanovllm import RequestOutput, SamplingParams, demo_model
from nanovllm.core.messages import TokenLogprobs
from nanovllm.core.sequence import Sequence
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.request import Request
from nanovllm.options.sampling_params import RequestOutputKind
from nanovllm.outputs import CompletionOutput

PROMPT = [5, 6, 7]


class Streamed:
    """One streamed request, whose tokens the test chooses."""

    def __init__(self, **options: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(demo_model.MODEL)
        params = SamplingParams(**{"max_tokens": 10**6, **options})
        self.seq = Sequence(0, PROMPT, params)
        self.processor = OutputProcessor(self.tokenizer)
        self.request = Request("abc", params, [self.seq], stream=True)
        self.processor.add_request(self.request)

    def generate(self, token_ids: list[int]) -> str | None:
        """Generate tokens; return the stop string that they complete."""
        self.seq.token_ids += token_ids
        if self.seq.params.logprobs is not None:
            self.seq.output.logprobs += [TokenLogprobs([token], [-0.5], 1) for token in token_ids]
        _, ending = self.processor.process_tokens(self.seq, time.monotonic())
        return None if ending is None else ending.stop_reason

    def send(self) -> RequestOutput:
        """Return the next output, which there must be."""
        output = self.processor.make_output(self.request)
        assert output is not None
        return output

    def step(self, token_ids: list[int]) -> CompletionOutput:
        """Generate tokens and send them."""
        self.generate(token_ids)
        return self.send().outputs[0]


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_token_costs_the_same_after_many(logprobs: int | None, stop: tuple[str, ...]) -> None:
    """Symptom: each delta copies all token ids and the text, and sums all log-probabilities."""
    streamed = Streamed(logprobs=logprobs, stop=stop)
    letters = [streamed.tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefgh"]
    first = streamed.step(letters * 2_500)
    assert len(first.token_ids) == 20_000
    tracemalloc.start()
    peaks = []
    for count in range(1, 10):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        delta = streamed.step(letters[:1])
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        assert delta.token_ids == letters[:1]
        expected = None if logprobs is None else -0.5 * (20_000 + count)
        assert delta.cumulative_logprob == expected
    tracemalloc.stop()
    assert sorted(peaks)[4] < 8192  # bytes; a list of the ids alone takes 160,000


@pytest.mark.parametrize("include", [True, False])
def test_stop_string_may_end_with_token_min_tokens(include: bool) -> None:
    streamed = Streamed(stop="c", min_tokens=3, include_stop_str_in_output=include)
    a, c = (streamed.tokenizer.convert_tokens_to_ids(letter) for letter in "ac")
    assert streamed.generate([a, c]) is None  # too early
    assert streamed.generate([c]) == "c"
    assert streamed.send().outputs[0].text == ("acc" if include else "ac")


@pytest.mark.parametrize(("min_tokens", "stop_string"), [(2, "\ufffd"), (3, None)])
def test_stop_string_at_the_end_of_min_tokens(min_tokens: int, stop_string: str | None) -> None:
    """Half a character becomes U+FFFD only when the output ends."""
    streamed = Streamed(stop="\ufffd", min_tokens=min_tokens)
    half, _ = streamed.tokenizer.encode("é")
    streamed.seq.output.finish_reason = "length"
    assert streamed.generate([half, half]) == stop_string


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("count", [None, 0])
def test_prompt_logprobs_are_sent_once(count: int | None, kind: RequestOutputKind) -> None:
    """Or with each output that has all so far."""
    streamed = Streamed(prompt_logprobs=count, output_kind=kind)
    streamed.seq.output.prompt_logprobs = {place: TokenLogprobs([7], [-1.0], 1) for place in (1, 2)}
    streamed.generate([10])
    first = streamed.send().prompt_logprobs
    streamed.generate([11])
    second = streamed.send().prompt_logprobs
    if count is None:
        assert (first, second) == (None, None)
    else:
        assert first is not None
        assert [entries and entries[7].logprob for entries in first] == [None, -1.0, -1.0]
        assert second == (None if kind is RequestOutputKind.DELTA else first)


@pytest.mark.parametrize("detokenize", [True, False])
def test_logprobs_have_text_only_with_detokenize(detokenize: bool) -> None:
    streamed = Streamed(logprobs=0, prompt_logprobs=0, detokenize=detokenize)
    streamed.seq.output.prompt_logprobs = {1: TokenLogprobs([64], [-1.0], 1)}
    streamed.generate([64])
    output = streamed.send()
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    for entries in (output.outputs[0].logprobs[0], output.prompt_logprobs[1]):
        assert entries is not None
        assert entries[64].decoded_token == ("a" if detokenize else None)
