"""The options scheduling_policy and eviction_policy: classes from outside of the package."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from examples.lab.lfu_eviction import LeastFrequentlyUsed
from examples.lab.shortest_job_first import ShortestFirst
from nanovllm import AsyncLLM, SamplingParams, demo_model
from nanovllm.core.sequence import Sequence
from nanovllm.errors import ConfigError, EngineDeadError, PluginError
from nanovllm.options.plugins import load_class
from nanovllm.scheduler.fair_policy import FairPolicy
from nanovllm.scheduler.policy import Policy
from tests.glossary import GREEDY
from tests.helpers import assert_idle

HERE = "tests.test_policies"
OPTIONS: dict[str, Any] = {"max_model_len": 128, "kvcache_block_size": 16}
POLICY = "examples.lab.shortest_job_first:ShortestFirst"
EVICTION = "examples.lab.lfu_eviction:LeastFrequentlyUsed"


class NeedsMore(ShortestFirst):
    def __init__(self, ageing: int) -> None:
        super().__init__()


class Fails(ShortestFirst):
    def __init__(self) -> None:
        raise KeyError(1)


class LacksFirst(Policy):
    def order(self, seq: Sequence) -> int:
        return seq.seq_id

    def push(self, seq: Sequence) -> None: ...

    def remove(self, seq: Sequence) -> None: ...


class CannotRemove(ShortestFirst):
    def remove(self, seq: Sequence) -> None:
        raise KeyError(7)


class NoPages(LeastFrequentlyUsed):
    def __init__(self) -> None:
        super().__init__(10)


class CannotKeep(LeastFrequentlyUsed):
    def put_last(self, page: int) -> None:
        raise KeyError(7)


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
    for part, kind in (
        (scheduler.policy, ShortestFirst),
        (scheduler.block_manager.pool.free, LeastFrequentlyUsed),
    ):
        assert isinstance(part, kind)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert_idle(llm)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:Class", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("examples.lab.lfu_eviction:LeastFrequentlyUse", "did you mean 'LeastFrequentlyUsed"),
        ("examples.lab.lfu_eviction:count", "a class derived from nanovllm.kv.eviction.Evic"),
        (POLICY, "must name a class derived from nanovllm.kv.eviction.EvictionOrder, but"),
        (
            "nanovllm.kv.eviction:EvictionOrder",
            "lacks the methods __contains__(page), __init__(num_p",
        ),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_the_model_is_loaded(
    make_llm: Any, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm(demo_model.MODEL, **OPTIONS, eviction_policy=value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NeedsMore", "NeedsMore is called as NeedsMore(), but its __init__ takes other arguments"),
        ("Fails", 'scheduling_policy="tests.test_policies:Fails": __init__() raised KeyError: 1'),
        ("LacksFirst", '"tests.test_policies:LacksFirst" lacks the method first()'),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(make_llm: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm(demo_model.MODEL, **OPTIONS, scheduling_policy=f"{HERE}:{name}")


def test_an_order_is_made_for_a_number_of_pages(make_llm: Any) -> None:
    message = r"NoPages is called as NoPages\(num_pages\), but its __init__ takes other arguments"
    with pytest.raises(ConfigError, match=message):
        make_llm(demo_model.MODEL, **OPTIONS, eviction_policy=f"{HERE}:NoPages")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def broken(:", "cannot be imported: SyntaxError: .*line 1.$"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'$"),
        ("import broken_plugin.sub", "'broken_plugin' is not a package$"),
    ],
)
def test_a_broken_module_needs_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    """Symptom: the message advises PYTHONPATH, which has the folder already."""
    (tmp_path / "broken_plugin.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_class("scheduling_policy", "broken_plugin:Policy", FairPolicy)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_policy_that_fails_ends_the_engine(
    make_llm: Any, caplog: pytest.LogCaptureFixture, num_ranks: int
) -> None:
    """Symptom: every later call hangs, and each request is a traceback in the log."""
    wrong = f"{HERE}:CannotRemove"
    llm = make_llm(
        demo_model.MODEL, **OPTIONS, scheduling_policy=wrong, tensor_parallel_size=num_ranks
    )
    message = f'"{wrong}": remove\\(\\) raised KeyError: 7; the engine has ended'
    with pytest.raises(PluginError, match=message) as raised:
        llm.generate(["Hi"] * 3, use_tqdm=False)
    assert isinstance(raised.value.__cause__, KeyError)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=message):
            llm.generate("Hi", use_tqdm=False)
    with pytest.raises(EngineDeadError, match=message):
        llm.engine.step()
    (record,) = caplog.records
    assert record.getMessage() == "the engine's thread failed"


@pytest.mark.timeout(100)
def test_an_eviction_that_fails_ends_every_request() -> None:
    wrong = f"{HERE}:CannotKeep"
    llm = AsyncLLM(demo_model.MODEL, **OPTIONS, eviction_policy=wrong)
    message = f'"{wrong}": put_last\\(\\) raised KeyError: 7'

    async def main() -> None:
        asks = [llm.generate("What is a KV cache?", GREEDY) for _ in range(4)]
        for error in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert re.search(message, str(error))
        with pytest.raises(EngineDeadError, match=message):
            await llm.generate("Hi", GREEDY)
        with pytest.raises(EngineDeadError, match=message):
            await llm.check_health()

    try:
        asyncio.run(main())
    finally:
        llm.shutdown()
