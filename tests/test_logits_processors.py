"""Logits processors: functions of the user's that change a row of logits before it is sampled."""

from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.errors import InvalidRequestError
from tests.helpers import assert_idle, generate_all

PROMPT = [3, 1, 4, 1, 5, 9]
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def llm(random_llm: LLM) -> LLM:
    return random_llm


def tokens_of(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    ((output),) = generate_all(llm, [(prompt, params)])
    return output.token_ids


def only(token: int) -> Any:
    """Return a processor that allows one token; it returns a new row."""

    def force(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        row = torch.full_like(logits, -torch.inf)
        row[token] = 0
        return row

    return force


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_processor_decides_the_token(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature, 5, ignore_eos=True, logits_processors=[only(77)])
    assert tokens_of(llm, params) == [77] * 5


def test_processor_gets_the_tokens_so_far_as_lists_of_its_own(llm: LLM) -> None:
    seen: list[Any] = []

    def two(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(output))
        assert (logits.dtype, logits.shape) == (torch.float32, (1003,))
        output.append(0)
        return logits

    def three(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((list(prompt), len(output)))
        return logits

    params = SamplingParams(**GREEDY, max_tokens=3, logits_processors=[two])
    tokens = tokens_of(llm, params)
    assert seen == [tokens[:0], tokens[:1], tokens[:2]]
    seen.clear()
    assert tokens_of(llm, params.clone(logits_processors=[three])) == tokens
    assert seen == [(PROMPT, 0), (PROMPT, 1), (PROMPT, 2)]


def test_processors_run_in_order_and_before_the_other_rules(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, max_tokens=2, logits_processors=[only(7), only(9)])
    assert tokens_of(llm, params) == [9, 9]
    favour = SamplingParams(**GREEDY, max_tokens=2, logits_processors=[lambda ids, row: row + NINE])
    assert tokens_of(llm, favour) == [9, 9]
    assert tokens_of(llm, favour.clone(allowed_token_ids=[5])) == [5, 5]
    assert 9 not in tokens_of(llm, favour.clone(logit_bias={9: -100}))


NINE = torch.zeros(1003).index_fill(0, torch.tensor([9]), 50.0)


def test_other_rows_of_the_batch_do_not_change(llm: LLM) -> None:
    plain = [(PROMPT[index:], SamplingParams(**GREEDY, max_tokens=6)) for index in range(3)]
    ruled = (PROMPT, SamplingParams(**GREEDY, max_tokens=6, logits_processors=[only(2)], n=2))
    alone = generate_all(llm, plain)
    *beside, forced = generate_all(llm, [*plain, ruled])
    assert [o.token_ids for o in beside] == [o.token_ids for o in alone]
    assert [c.token_ids for c in forced.outputs] == [[2] * 6] * 2


def raises(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(token_ids) == 2:
        raise KeyError("x" * 10_000)
    return logits


WRONG = {
    "raises": (raises, "a logits processor failed: KeyError: 'xxx"),
    "returns nothing": (lambda ids, row: None, "TypeError: it must return logits of shape [1003]"),
    "returns a list": (
        lambda ids, row: row.tolist(),
        "it must return logits of shape [1003], not [",
    ),
    "another shape": (lambda ids, row: row[:5], "logits of shape [1003], not shape [5]"),
    "a matrix": (lambda ids, row: row[None], "logits of shape [1003], not shape [1, 1003]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_failing_processor_ends_its_request_and_no_other(llm: LLM, case: str) -> None:
    processor, reason = WRONG[case]
    good = (PROMPT, SamplingParams(**GREEDY, max_tokens=6))
    bad = (
        PROMPT,
        SamplingParams(**GREEDY, max_tokens=6, logits_processors=[processor], logprobs=1),
    )
    (expected,) = generate_all(llm, [good])
    before, failed, after = generate_all(llm, [good, bad, good])
    assert before.token_ids == after.token_ids == expected.token_ids
    (completion,) = failed.outputs
    assert (failed.finished, completion.finish_reason) == (True, "error")
    assert reason in str(completion.stop_reason)
    assert len(str(completion.stop_reason)) < 400
    num_tokens = 2 if case == "raises" else 0
    assert completion.token_ids == expected.token_ids[:num_tokens]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == num_tokens
    assert_idle(llm)
    (again,) = generate_all(llm, [good])
    assert again.token_ids == expected.token_ids


def test_failing_processor_ends_a_stream_with_its_reason(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, max_tokens=6, logits_processors=[raises])
    pieces = [piece.outputs[0] for piece in llm.stream(PROMPT, params)]
    assert [piece.finish_reason for piece in pieces] == [None, None, "error"]
    assert [len(piece.token_ids) for piece in pieces] == [1, 1, 0]
    assert_idle(llm)


def test_ctrl_c_in_a_processor_is_not_an_error_of_the_request(llm: LLM) -> None:
    def interrupted(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokens_of(llm, SamplingParams(max_tokens=2, logits_processors=[interrupted]))
    assert_idle(llm)


def test_processors_are_refused_with_several_ranks() -> None:
    options: dict[str, Any] = {"vocab_size": 9, "max_model_len": 48, "seed": 0, "max_logprobs": 0}
    processor = InputProcessor(None, in_process=False, **options)
    with pytest.raises(InvalidRequestError, match="must be 1, without Ray; use logit_bias"):
        processor.make_request([1], SamplingParams(logits_processors=[only(1)]))
