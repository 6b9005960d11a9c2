"""The options scheduling_policy and eviction_policy: classes from outside of the package."""

import re
from typing import Any

import pytest

from nanovllm import SamplingParams, demo_model
from nanovllm.errors import ConfigError
from tests.helpers import assert_idle
from tests.kv.least_frequently_used import LeastFrequentlyUsed
from tests.scheduler.shortest_first import ShortestFirst

OPTIONS: dict[str, Any] = {"max_model_len": 128, "kvcache_block_size": 16}
POLICY = "tests.scheduler.shortest_first:ShortestFirst"
EVICTION = "tests.kv.least_frequently_used:LeastFrequentlyUsed"


def test_an_engine_has_another_policy_and_eviction(make_llm: Any) -> None:
    """They change the order of requests, and no token."""
    prompts = ["What is a KV cache?", "A KV cache is", "What is a token?"] * 3
    params = [
        SamplingParams(temperature=0, max_tokens=4 + 5 * (index % 4), ignore_eos=True)
        for index in range(len(prompts))
    ]
    expected = make_llm(demo_model.MODEL, **OPTIONS).generate(prompts, params, use_tqdm=False)
    more = {"max_num_seqs": 2, "num_kvcache_blocks": 12}
    llm = make_llm(
        demo_model.MODEL, **OPTIONS, **more, scheduling_policy=POLICY, eviction_policy=EVICTION
    )
    scheduler = llm.engine.scheduler
    assert isinstance(scheduler.policy, ShortestFirst)
    assert isinstance(scheduler.block_manager.pool.free, LeastFrequentlyUsed)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert_idle(llm)


def test_the_shortest_request_is_answered_first(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS, max_num_seqs=1, scheduling_policy=POLICY)
    engine, ended = llm.engine, []
    for max_tokens in (100, 90, 4):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.add_request("A KV cache is", params, request_id=str(max_tokens))
    while not engine.is_finished():
        ended += [output.request_id for output in engine.step()]
    assert ended == ["4", "100", "90"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:Class", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("tests.kv.least_frequently_used:LeastFrequentlyUse", "did you mean 'LeastFrequentlyUsed"),
        ("tests.kv.least_frequently_used:count", "a class derived from nanovllm.kv.eviction.Evic"),
        (POLICY, "must name a class derived from nanovllm.kv.eviction.EvictionOrder, but"),
        ("nanovllm.kv.eviction:EvictionOrder", "lacks the methods __contains__, __init__, __iter"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_the_model_is_loaded(
    make_llm: Any, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm(demo_model.MODEL, **OPTIONS, eviction_policy=value)


def test_a_policy_is_not_an_eviction(make_llm: Any) -> None:
    with pytest.raises(ConfigError, match=r"derived from nanovllm\.scheduler\.policy\.Policy, but"):
        make_llm(demo_model.MODEL, **OPTIONS, scheduling_policy=EVICTION)
