"""Inputs that are no tokens: a feature that no model has, and all of it is in this file.

Some tokens of a prompt stand for vectors. The tokens of a span have one place, so the angles of
those after it are not those of their positions.
"""

import dataclasses
import itertools
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.attention.batch import Replaced
from nanovllm.core.messages import Admission, InputSpan, Row, Schedule
from nanovllm.core.sequence import Sequence
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.factory import make_engine
from nanovllm.kernels.cpu.library import library
from nanovllm.options.config import Config
from nanovllm.outputs import RequestOutput
from nanovllm.worker.hooks import RowNeeds, WorkerHook
from tests.checkpoints import SMALL

SOFT = 5
"""The token that stands for a vector, and may also be text."""
OPTIONS: dict[str, Any] = {"max_model_len": 64, "kvcache_block_size": 4, "device": "cpu"}
SLIDING = {
    "model_type": "gemma3_text",  # with two tables of angles
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
SMALL_STEPS = {"max_num_batched_tokens": 7}
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, logprobs=0, ignore_eos=True)


@dataclasses.dataclass
class Prompt:
    """Text with vectors: the lengths of spans by their first positions, and a seed of each."""

    token_ids: list[int]
    spans: dict[int, tuple[int, int]]

    @property
    def vectors(self) -> dict[int, torch.Tensor]:
        """By first position, [length, hidden_size]."""
        found = {}
        for start, (length, seed) in self.spans.items():
            random = torch.Generator().manual_seed(seed)
            found[start] = torch.randn(length, SMALL["hidden_size"], generator=random) / 8
        return found

    @property
    def places(self) -> list[int]:
        """The row of the table of angles of each token."""
        starts = {
            position: start
            for start, (length, _) in self.spans.items()
            for position in range(start, start + length)
        }
        place = -1
        found = []
        for position in range(len(self.token_ids)):
            place += starts.get(position, position) == position
            found.append(place)
        return found


def text(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(10, 1000, (length,), generator=random).tolist()


def with_spans(token_ids: list[int], spans: dict[int, tuple[int, int]]) -> Prompt:
    for start, (length, _) in spans.items():
        token_ids[start : start + length] = [SOFT] * length
    return Prompt(token_ids, spans)


PROMPTS = [
    with_spans(text(30, 0), {6: (9, 0), 20: (3, 1)}),
    with_spans(text(30, 0), {6: (9, 2), 20: (3, 1)}),  # the same tokens
    with_spans(text(9, 1), {0: (9, 3)}),
    with_spans(text(21, 2), {}),
    with_spans(text(30, 0), {}),
    Prompt(with_spans(text(30, 0), {6: (9, 0), 20: (3, 1)}).token_ids, {}),  # soft ones are text
]


class Vectors(WorkerHook):
    """Gives tokens the vectors and places that the extras of their sequences have."""

    def __init__(self) -> None:
        self._admitted: dict[int, Admission] = {}

    def begin(self, schedule: Schedule) -> None:
        self._admitted.update((new.table_idx, new) for new in schedule.admissions)

    def begin_rows(self, rows: list[Row]) -> RowNeeds | None:
        placed: list[tuple[int, int]] = []
        vectors: list[tuple[int, torch.Tensor]] = []
        index = 0
        for row in rows:
            new = self._admitted.get(row.table_idx)
            for position in range(row.num_computed_tokens, row.end):
                if new is not None and new.extras and position < new.num_prompt_tokens:
                    of_positions, places = new.extras["vectors"]
                    placed.append((index, places[position]))
                    if position in of_positions:
                        vectors.append((index, of_positions[position]))
                index += 1
        if not placed:
            return None
        embeds = None
        if vectors:
            where, values = zip(*vectors, strict=True)
            embeds = Replaced(torch.tensor(where), torch.stack(values))
        return RowNeeds(embeds=embeds, rope=Replaced(*torch.tensor(placed).unbind(1)))


@pytest.fixture
def make() -> Any:
    """Make an engine with the feature; it is shut down at the test's end."""
    made: list[LLMEngine] = []

    def make(model: str, **options: Any) -> LLMEngine:
        made.append(make_engine(Config(model, **{**OPTIONS, **options})))
        made[-1].executor._runner.parts.append(Vectors())  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def set_inputs(seq: Sequence, prompt: Prompt) -> None:
    """Let a sequence have the vectors of a prompt."""
    seq.inputs = tuple(
        InputSpan(start, len(found), sha256(found.numpy().tobytes()).digest())
        for start, found in prompt.vectors.items()
    )
    of_positions = {
        start + i: vector
        for start, found in prompt.vectors.items()
        for i, vector in enumerate(found)
    }
    places = prompt.places
    if of_positions:
        seq.extras = {"vectors": (of_positions, places)}
        seq.rope_offset = places[-1] + 1 - len(places)


def run(
    engine: LLMEngine, prompts: list[Prompt], *, lost_before: tuple[int, ...] = ()
) -> list[RequestOutput]:
    """Return the outputs; before some steps all running sequences lose their KV."""
    ids = []
    for prompt in prompts:
        request = engine.input_processor.make_request(prompt.token_ids, PARAMS)
        set_inputs(request.sequences[0], prompt)
        engine.queue(request)
        ids.append(request.request_id)
    found = {}
    for step in itertools.count(1):
        if engine.is_finished():
            return [found[request_id] for request_id in ids]
        if step in lost_before:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        found.update((output.request_id, output) for output in engine.step())
    raise AssertionError("unreachable")


def told(output: RequestOutput) -> tuple[list[int], float]:
    completion = output.outputs[0]
    assert completion.cumulative_logprob is not None
    return completion.token_ids, completion.cumulative_logprob


@torch.no_grad()
def by_transformers(model: str, prompt: Prompt) -> tuple[list[int], float]:
    """Return greedy tokens and the sum of their log-probabilities."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    embeds = theirs.get_input_embeddings()(torch.tensor([prompt.token_ids]))
    for start, found in prompt.vectors.items():
        embeds[0, start : start + len(found)] = found
    places = prompt.places
    tokens: list[int] = []
    total = 0.0
    for _ in range(PARAMS.max_tokens):
        # With a mask, transformers does not take repeated places for the begin of another text.
        mask = torch.ones(1, len(places), dtype=torch.int64)
        given = {"inputs_embeds": embeds, "position_ids": torch.tensor([places])}
        scores = theirs(**given, attention_mask=mask).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        total += float(scores.max())
        places = [*places, places[-1] + 1]
        embeds = torch.cat([embeds, theirs.get_input_embeddings()(torch.tensor([tokens[-1:]]))], 1)
    return tokens, total


@pytest.mark.parametrize("config", [{}, SLIDING], ids=["full", "sliding"])
def test_vectors_and_places_are_those_of_transformers(
    shared_checkpoint: Callable[..., str], make: Any, config: dict[str, Any]
) -> None:
    """In chunks that cut spans, with hits inside one, and after the KV was lost."""
    model = shared_checkpoint(**config)
    expected = [by_transformers(model, prompt) for prompt in PROMPTS]
    assert expected[0] != expected[1] != expected[5]
    for options in ({}, SMALL_STEPS):
        engine = make(model, dtype="float32", **options)
        for lost_before in ((), (), (4, 12)):
            outputs = run(engine, PROMPTS, lost_before=lost_before)
            for (tokens, total), output in zip(expected, outputs, strict=True):
                found, found_total = told(output)
                assert found == tokens
                assert found_total == pytest.approx(total, abs=1e-3)


def test_only_equal_inputs_share_blocks(shared_checkpoint: Callable[..., str], make: Any) -> None:
    engine = make(shared_checkpoint(), dtype="float32")
    cached = [run(engine, [prompt])[0].num_cached_tokens for prompt in (*PROMPTS, *PROMPTS)]
    assert cached == [0, 4, 0, 0, 4, 4, 28, 28, 8, 20, 28, 28]
    moved = with_spans(text(30, 0), {7: (9, 0), 20: (3, 1)})
    assert run(engine, [moved])[0].num_cached_tokens == 4


@pytest.mark.skipif(library() is None, reason="no compiler here")
def test_bits_do_not_depend_on_how_steps_run(
    shared_checkpoint: Callable[..., str], make: Any
) -> None:
    """In bfloat16, with C kernels: recorded steps move places, too."""
    model = shared_checkpoint(dtype="bfloat16", hidden_size=64, head_dim=32)
    alone = make(model, enforce_eager=True, kvcache_block_size=32)
    expected = [told(run(alone, [prompt])[0]) for prompt in PROMPTS]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    for options in ({}, SMALL_STEPS, {"speculative_config": drafts}):
        engine = make(model, kvcache_block_size=32, **options)
        assert engine.worker_info.arithmetic is not None
        assert engine.worker_info.arithmetic.batch_invariant
        assert [told(output) for output in run(engine, PROMPTS)] == expected
