"""Several continuations of a prompt: what they share, and their seeds."""

import random
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.outputs import RequestOutput
from nanovllm.testing.invariants import check_scheduler
from tests.helpers import generate_all, random_prompt

OPTIONS = {"dtype": "float32", "max_model_len": 48}


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize(("enable_prefix_caching", "most_blocks"), [(True, 8 + 4), (False, 4 * 9)])
def test_continuations_share_the_blocks_of_the_prompt(
    random_model: str, enable_prefix_caching: bool, most_blocks: int, prompt_logprobs: int | None
) -> None:
    """The prompt fills 8 blocks; each continuation has one block of its own."""
    config = Config(
        model=random_model,
        kvcache_block_size=4,
        enable_prefix_caching=enable_prefix_caching,
        **OPTIONS,
    )
    engine = make_engine(config)
    prompt = random_prompt(random.Random(6), 33)
    params = SamplingParams(
        n=4, seed=1, max_tokens=3, ignore_eos=True, prompt_logprobs=prompt_logprobs
    )
    engine.add_request(prompt, params)
    manager = engine.scheduler.block_manager
    used = []
    outputs: list[RequestOutput] = []
    while not engine.is_finished():
        outputs += engine.step()
        used.append(engine.worker_info.num_blocks - manager.num_free_blocks)
        check_scheduler(engine.scheduler)
    engine.shutdown()
    assert max(used) == most_blocks
    assert used[-1] == 0
    assert [c.index for c in outputs[0].outputs] == [0, 1, 2, 3]
    assert engine.stats.num_decode_tokens == 12


@pytest.mark.parametrize("seed", [100, 2**63 - 2])
def test_each_continuation_has_the_next_seed(random_llm: LLM, seed: int) -> None:
    prompt = random_prompt(random.Random(6), 9)
    options: dict[str, Any] = {"max_tokens": 8, "top_p": 0.95, "presence_penalty": 0.5}
    (output,) = generate_all(random_llm, [(prompt, SamplingParams(n=4, seed=seed, **options))])
    seeds = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(4)]  # of 64 bits
    alone = generate_all(random_llm, [(prompt, SamplingParams(seed=s, **options)) for s in seeds])
    assert [c.token_ids for c in output.outputs] == [o.token_ids for o in alone]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4


def test_continuations_without_a_seed_differ(random_llm: LLM) -> None:
    (output,) = generate_all(
        random_llm, [([1, 2], SamplingParams(n=5, max_tokens=8, ignore_eos=True))]
    )
    assert len({tuple(c.token_ids) for c in output.outputs}) == 5
