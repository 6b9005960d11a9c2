"""What /metrics says, read back with Prometheus' own parser, against what the requests did."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanovllm import AsyncLLM, RequestOutput, SamplingParams, demo_model
from nanovllm.apps.server.prometheus import (
    PrometheusHistogram,
    RequestMeter,
    ServerMetrics,
    bucket_bounds,
)
from nanovllm.errors import EngineDeadError, InvalidRequestError
from nanovllm.testing.fake_engine import fake_controller
from tests.glossary import GREEDY, OPTIONS, QUESTION, QUESTIONS
from tests.server.dashboards import labels_of, metrics_of, queries

NAME = 'a "model"\\\n'
REPEATED = SamplingParams(0, 30, ignore_eos=True, allowed_token_ids=[3])
"""Lookup finds drafts for an output of one token again and again."""
Samples = dict[str, float]
"""Values by name and the labels other than model_name and engine."""


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(demo_model.MODEL, speculative_config={"method": "ngram"}, **OPTIONS)
    llm.engine.scheduler.drafting.controller = fake_controller(lambda most: min(most, 2))
    yield llm
    llm.shutdown()


@pytest.fixture
def metrics(llm: AsyncLLM) -> ServerMetrics:
    return ServerMetrics(NAME, llm)


async def scrape(metrics: ServerMetrics) -> Samples:
    found: Samples = {}
    text = (await metrics.render()).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "model_name" in labels:
                assert labels.pop("model_name") == NAME
                assert labels.pop("engine", "0") == "0"
            words = ",".join(f"{name}={value}" for name, value in labels.items())
            found[f"{sample.name}{{{words}}}" if words else sample.name] = sample.value
    return found


async def whole(
    metrics: ServerMetrics, llm: AsyncLLM, prompt: Any, params: SamplingParams
) -> RequestOutput:
    with RequestMeter(metrics, params) as meter:
        output = await llm.generate(prompt, params)
        meter.observe(output)
    return output


async def stream(
    metrics: ServerMetrics, llm: AsyncLLM, prompt: Any, params: SamplingParams
) -> list[RequestOutput]:
    deltas = []
    with RequestMeter(metrics, params) as meter:
        async for delta in llm.stream(prompt, params):
            meter.observe(delta)
            deltas.append(delta)
    return deltas


def test_counts_are_those_of_the_requests(llm: AsyncLLM, metrics: ServerMetrics) -> None:
    async def run() -> None:
        before = await scrape(metrics)
        three = SamplingParams(temperature=1, max_tokens=7, n=3, seed=1)
        a, b, c, d = await asyncio.gather(
            whole(metrics, llm, QUESTION, GREEDY),
            whole(metrics, llm, QUESTIONS[1], three),
            stream(metrics, llm, QUESTIONS[2], GREEDY),
            stream(metrics, llm, QUESTIONS[3], three),
        )
        after = await scrape(metrics)
        deltas = [*c, *d]
        completions = [x for output in (a, b, *deltas) for x in output.outputs]
        num_tokens = sum(len(x.token_ids) for x in completions)
        reasons = [x.finish_reason for x in completions if x.finish_reason]
        prompts = [len(output.prompt_token_ids) for output in (a, b, c[-1], d[-1])]

        def added(name: str) -> float:
            return after[name] - before.get(name, 0.0)

        assert len(reasons) == 8
        for reason in ("stop", "length", "abort", "error"):
            count = added(f"vllm:request_success_total{{finished_reason={reason}}}")
            assert count == reasons.count(reason)
        assert added("vllm:generation_tokens_total") == num_tokens
        assert added("vllm:request_generation_tokens_sum") == num_tokens
        assert added("vllm:request_generation_tokens_count") == 8
        assert added("vllm:request_prompt_tokens_sum") == (
            prompts[0] + prompts[2] + 3 * (prompts[1] + prompts[3])
        )
        assert added("vllm:time_to_first_token_seconds_count") == 4
        assert added("vllm:time_to_first_token_seconds_sum") == pytest.approx(
            sum(x.metrics.time_to_first_token or 0 for x in (a, b, c[-1], d[-1]))
        )
        # Nothing was lost between the first token of a continuation and its last.
        gaps = added("vllm:inter_token_latency_seconds_count")
        assert gaps == num_tokens - 8
        assert added("vllm:iteration_tokens_total_sum") >= num_tokens - 8 + sum(prompts)
        num_steps = added("vllm:iteration_tokens_total_count")
        assert 0 < num_steps == added("vllm:iteration_tokens_total_bucket{le=+Inf}")
        assert added("vllm:request_params_n_sum") == 1 + 3 + 1 + 3
        assert added("vllm:request_params_max_tokens_sum") == 2 * (160 + 7)
        assert added("vllm:e2e_request_latency_seconds_count") == 8
        assert (
            added("vllm:request_queue_time_seconds_sum")
            + added("vllm:request_prefill_time_seconds_sum")
            + added("vllm:request_decode_time_seconds_sum")
        ) <= added("vllm:e2e_request_latency_seconds_sum")
        assert added("vllm:request_inference_time_seconds_sum") == pytest.approx(
            added("vllm:request_prefill_time_seconds_sum")
            + added("vllm:request_decode_time_seconds_sum")
        )
        longest = [max(len(x.token_ids) for x in output.outputs) for output in (a, b)]
        assert added("vllm:request_max_num_generation_tokens_sum") >= sum(longest)
        assert added("vllm:request_max_num_generation_tokens_count") == 4
        assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
        assert after["vllm:kv_cache_usage_perc"] == 0

    asyncio.run(run())


def test_time_between_tokens_of_a_stream(llm: AsyncLLM, metrics: ServerMetrics) -> None:
    """Tokens that come together share the time since the last ones."""

    async def run() -> None:
        deltas = await stream(metrics, llm, QUESTION, REPEATED)
        samples = await scrape(metrics)
        times = deltas[-1].metrics
        assert samples["vllm:inter_token_latency_seconds_sum"] == pytest.approx(
            times.last_token_time - times.first_token_time
        )
        assert samples["vllm:inter_token_latency_seconds_count"] == 29
        assert max(len(delta.token_ids) for delta in deltas) > 1

    asyncio.run(run())


def test_a_request_that_is_left_was_aborted(llm: AsyncLLM, metrics: ServerMetrics) -> None:
    async def run() -> None:
        with RequestMeter(metrics, GREEDY) as meter:
            async for delta in llm.stream(QUESTION, GREEDY):
                meter.observe(delta)
                break
        two = GREEDY.clone(n=2)
        with pytest.raises(ZeroDivisionError), RequestMeter(metrics, two):
            raise ZeroDivisionError
        with pytest.raises(EngineDeadError), RequestMeter(metrics, two):
            raise EngineDeadError
        with pytest.raises(InvalidRequestError):
            await whole(metrics, llm, [-1], two)
        samples = await scrape(metrics)
        assert samples["vllm:request_success_total{finished_reason=abort}"] == 3
        assert samples["vllm:request_success_total{finished_reason=error}"] == 2
        assert samples["vllm:e2e_request_latency_seconds_count"] == 5
        assert samples["vllm:time_to_first_token_seconds_count"] == 1
        assert samples["vllm:request_prompt_tokens_count"] == 1

    asyncio.run(run())


VLLM_HISTOGRAMS = [
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_prefill_kv_computed_tokens"),
    *("request_generation_tokens", "request_params_max_tokens"),
    *("request_max_num_generation_tokens", "request_params_n"),
]
VLLM_VALUES = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
]


def test_names_are_those_of_vllm(llm: AsyncLLM, metrics: ServerMetrics) -> None:
    async def run() -> None:
        await whole(metrics, llm, QUESTION, REPEATED)
        samples = await scrape(metrics)
        for name in VLLM_VALUES:
            assert f"vllm:{name}" in samples
        for name in VLLM_HISTOGRAMS:
            count = samples[f"vllm:{name}_count"]
            assert samples[f"vllm:{name}_bucket{{le=+Inf}}"] == count >= 1
            bounds = [v for k, v in samples.items() if k.startswith(f"vllm:{name}_bucket")]
            assert bounds == sorted(bounds)
        accepted = samples["vllm:spec_decode_num_accepted_tokens_total"]
        prefix = "vllm:spec_decode_num_accepted_tokens_per_pos_total{position="
        positions = {k: v for k, v in samples.items() if k.startswith(prefix)}
        assert list(positions) == [f"{prefix}0}}", f"{prefix}1}}"]
        assert sum(positions.values()) == accepted > 0
        (info,) = (name for name in samples if name.startswith("vllm:cache_config_info"))
        assert f"num_gpu_blocks={llm.engine.worker_info.num_blocks}" in info
        assert f"block_size={llm.engine.worker_info.block_size}" in info
        assert samples["process_resident_memory_bytes"] > 2**20

    asyncio.run(run())


def test_event_loop_lag(metrics: ServerMetrics) -> None:
    async def run() -> Samples:
        task = asyncio.create_task(metrics.watch_event_loop())
        await asyncio.sleep(0.11)
        time.sleep(0.3)
        await asyncio.sleep(0.01)
        task.cancel()
        return await scrape(metrics)

    samples = asyncio.run(run())
    assert 0.2 <= samples["nanovllm:event_loop_lag_seconds_sum"] < 5
    late = "nanovllm:event_loop_lag_seconds_bucket{le=0.1}"
    assert samples[late] < samples["nanovllm:event_loop_lag_seconds_count"]


def test_a_bucket_holds_its_bound() -> None:
    histogram = PrometheusHistogram((1, 2.5))
    for value in (0, 1, 1.1, 2.5, 3):
        histogram.observe(value)
    histogram.observe(2, times=4)
    assert histogram.buckets() == [("1", 2), ("2.5", 8), ("+Inf", 9)]
    assert histogram.sum == pytest.approx(7.6 + 8)


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1]), (10, [1, 2, 5, 10]), (49, [1, 2, 5, 10, 20])]
)
def test_token_buckets_end_at_the_longest_sequence(most: int, expected: list[float]) -> None:
    assert list(bucket_bounds("vllm:request_prompt_tokens", most)) == expected


def test_the_board_and_the_alert_rules_use_metrics_that_are_there(metrics: ServerMetrics) -> None:
    metrics.refusals["queue_full"] += 1
    metrics.answers["/v1/completions", 200] += 1
    text = asyncio.run(metrics.render()).decode()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    found = list(queries())
    assert len(found) > 40
    for query in found:
        names = metrics_of(query)
        assert names or query.startswith("up{"), query
        assert names <= labels.keys(), query
        for name in names:
            assert labels_of(query) <= labels[name], query
