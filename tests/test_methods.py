"""Methods beside `generate`, `chat` and `stream`, and the progress bar."""

from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import EngineDeadError
from nanovllm.outputs import DraftCounts, Histogram, Metric, Vector
from nanovllm.testing.fake_engine import fake_controller
from nanovllm.testing.invariants import check_scheduler
from tests.glossary import GREEDY, OPTIONS, QUESTION
from tests.helpers import generate

SPECULATION: dict[str, Any] = {"speculative_config": {"method": "ngram"}}
LOOPING = SamplingParams(0, 24, ignore_eos=True, allowed_token_ids=[7])
"""The output is one token again and again, so all proposals are right."""


def test_reset_prefix_cache(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, kvcache_block_size=8, **OPTIONS)
    prompt = list(range(1, 49))
    cached = [generate(llm, prompt).num_cached_tokens for _ in range(2)]
    stream = llm.stream(QUESTION, GREEDY)
    next(stream)
    assert not llm.reset_prefix_cache(), "a running request holds blocks"
    stream.close()
    assert llm.reset_prefix_cache()
    check_scheduler(llm.engine.scheduler)
    cached += [generate(llm, prompt).num_cached_tokens for _ in range(2)]
    assert cached == [0, 40, 0, 40]
    check_scheduler(llm.engine.scheduler)


def test_metrics_have_vllms_names(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, max_num_seqs=2, **OPTIONS)

    def metrics() -> dict[str, float]:
        found = llm.get_metrics()
        return {metric.name: metric.value for metric in found if isinstance(metric, Metric)}

    assert set(metrics().values()) == {0}
    for _ in range(3):
        llm.add_request([1, 2, 3], GREEDY)
    for _ in range(4):
        llm.step()
    assert metrics() == {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 1,
        "vllm:kv_cache_usage_perc": 2 / OPTIONS["num_kvcache_blocks"],
        "vllm:prefix_cache_queries": 2 * 3,
        "vllm:prefix_cache_hits": 0,
        "vllm:num_preemptions": 0,
        "vllm:prompt_tokens": 2 * 3,
        "vllm:generation_tokens": 2 * 4,
        "nanovllm:prefill_tokens": 2 * 2,
    }
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate(QUESTION)


def test_metrics_have_the_tokens_of_steps(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS)
    for prompt in ([1, 2, 3], [4] * 9):
        llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    (found,) = [metric for metric in llm.get_metrics() if isinstance(metric, Histogram)]
    assert found.name == "vllm:iteration_tokens_total"
    assert (found.count, found.sum) == (2 * 4, 3 + 9 + 2 * 3)
    assert list(found.buckets.values()) == [6, 7, *[8] * 12]
    assert list(found.buckets)[:2] == ["1.0", "8.0"]


def test_metrics_of_speculation_have_vllms_names(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **SPECULATION, **OPTIONS)
    llm.engine.scheduler.drafting.controller = fake_controller(lambda most: min(most, 4))
    name = "vllm:spec_decode_num_"

    def metrics() -> dict[str, Any]:
        found = [metric for metric in llm.get_metrics() if "spec" in metric.name]
        vectors = {metric.name: metric.values for metric in found if isinstance(metric, Vector)}
        return vectors | {m.name: m.value for m in found if isinstance(m, Metric)}

    assert metrics() == {
        f"{name}drafts": 0,
        f"{name}draft_tokens": 0,
        f"{name}accepted_tokens": 0,
        f"{name}accepted_tokens_per_pos": [],
    }
    counts = DraftCounts()
    for output in llm.generate([[1, 2, 3, 4]] * 3, LOOPING, use_tqdm=False):
        counts += output.metrics.drafts
    assert counts.num_drafts > 0
    assert metrics() == {
        f"{name}drafts": counts.num_drafts,
        f"{name}draft_tokens": counts.num_draft_tokens,
        f"{name}accepted_tokens": counts.num_accepted_tokens,
        f"{name}accepted_tokens_per_pos": counts.num_accepted_tokens_per_pos,
    }
    mean = [m.value for m in llm.get_metrics() if m.name == "nanovllm:mean_acceptance_length"]
    assert mean == [counts.mean_acceptance_length]
    assert mean[0] > 1


def test_progress_bar_shows_the_acceptance_length(
    make_llm: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = make_llm(demo_model.MODEL, **SPECULATION, **OPTIONS)
    llm.engine.scheduler.drafting.controller = fake_controller(lambda most: min(most, 4))
    (output,) = llm.generate([1, 2, 3, 4], LOOPING)
    length = output.metrics.drafts.mean_acceptance_length
    shown = capfd.readouterr().err
    assert f"Acceptance length={length:.2f}" in shown
    assert "Decode=" in shown
    llm.generate([5], SamplingParams(max_tokens=1))
    assert "Acceptance" not in capfd.readouterr().err


def test_no_prompts_draw_no_progress_bar(demo_llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo_llm.generate([]) == []
    assert capfd.readouterr() == ("", "")
