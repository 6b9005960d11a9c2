"""GET /metrics for Prometheus: names, labels and buckets are vLLM's, so its dashboards work.

What belongs to requests is counted here, from their outputs; what belongs to the engine is asked of
it at each scrape.
"""

import asyncio
import itertools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric as Family,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from nanovllm.apps.server.request_log import RequestRecord
from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import (
    CompletionOutput,
    Gauge,
    Histogram as EngineHistogram,
    Metric,
    RequestMetrics,
    RequestOutput,
    Vector,
)

_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BOUNDS: dict[str, tuple[float, ...]] = {
    "vllm:time_to_first_token_seconds": _FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": _BETWEEN_TOKENS,
    "vllm:request_time_per_output_token_seconds": _BETWEEN_TOKENS,
    "vllm:request_params_n": (1, 2, 5, 10, 20),
    "nanovllm:event_loop_lag_seconds": _LAG,
}
"""Upper bounds of the buckets of histograms; other seconds have those of `_LATENCY`."""

HISTOGRAM_HELP = {
    "vllm:time_to_first_token_seconds": "Seconds from a request's arrival to its first token.",
    "vllm:inter_token_latency_seconds": "Seconds between tokens; those that come at once share it.",
    "vllm:request_time_per_output_token_seconds": "Mean seconds between a continuation's tokens.",
    "vllm:e2e_request_latency_seconds": "Seconds from arrival to the end of a continuation.",
    "vllm:request_queue_time_seconds": "Seconds from arrival until it was first scheduled.",
    "vllm:request_inference_time_seconds": "Seconds from the first scheduling to the last token.",
    "vllm:request_prefill_time_seconds": "Seconds from the first scheduling to the first token.",
    "vllm:request_decode_time_seconds": "Seconds from the first token to the last.",
    "vllm:request_prompt_tokens": "Prompt tokens of a continuation.",
    "vllm:request_prefill_kv_computed_tokens": "Prompt tokens that were not in the prefix cache.",
    "vllm:request_generation_tokens": "Output tokens of a continuation.",
    "vllm:request_max_num_generation_tokens": "Output tokens of a request's longest continuation.",
    "vllm:request_params_n": "The parameter n.",
    "vllm:request_params_max_tokens": "The parameter max_tokens.",
    "nanovllm:event_loop_lag_seconds": "How late the server's event loop wakes a task, in seconds.",
}

ENGINE_HELP = {
    "vllm:num_requests_running": "Continuations that have a place in the batch.",
    "vllm:num_requests_waiting": "Continuations that wait for one.",
    "vllm:kv_cache_usage_perc": "Part of the KV cache in use; 1 is all of it.",
    "vllm:prompt_tokens": "Prompt tokens of the continuations that were admitted.",
    "vllm:generation_tokens": "Output tokens.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Those of them that were found.",
    "vllm:num_preemptions": "Continuations that lost their KV because the cache was full.",
    "vllm:spec_decode_num_drafts": "Steps of a continuation with drafts.",
    "vllm:spec_decode_num_draft_tokens": "Proposed tokens.",
    "vllm:spec_decode_num_accepted_tokens": "Proposed tokens that were right.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "The same by position in the draft.",
    "vllm:iteration_tokens_total": "Tokens that a step computed.",
    "nanovllm:prefill_tokens": "Computed tokens from which no output token was sampled.",
    "nanovllm:mean_acceptance_length": "Mean tokens of a step with a draft.",
    "nanovllm:host_cache_hits": "Tokens whose KV came back from host memory.",
    "nanovllm:store_cache_hits": "Tokens whose KV came back from kv_cache_dir.",
    "nanovllm:swapped_tokens": "Those of both whose continuation had been preempted.",
    "nanovllm:offloaded_pages": "Pages of KV that were copied to host memory.",
    "nanovllm:kv_loads": "Times that a continuation waited for KV from below the cache.",
    "nanovllm:failed_kv_loads": "Those of them that found some of it missing or damaged.",
}


def bucket_bounds(name: str, most_tokens: int) -> tuple[float, ...]:
    """Return the bounds of a histogram; those of tokens are 1, 2, 5, 10 ... to `most_tokens`."""
    if name in _BOUNDS or name.endswith("_seconds"):
        return _BOUNDS.get(name, _LATENCY)
    numbers = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return tuple(itertools.takewhile(lambda number: number <= most_tokens, numbers))


FINISH_REASONS = ("stop", "length", "abort", "error")
_LAG_SECONDS = 0.1


class PrometheusHistogram:
    """Counts of values, by the first upper bound that they do not pass."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that occurred so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, values up to it) as Prometheus writes them."""
        total = 0
        found = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append((f"{bound:g}" if bound < float("inf") else "+Inf", float(total)))
        return found


class ServerMetrics:
    """All that the server counts, and the engine's own counts.

    Use it within the one event loop.
    """

    def __init__(self, model_name: str, llm: AsyncLLM) -> None:
        self._llm = llm
        self._labels = {"model_name": model_name, "engine": "0"}
        most = llm.engine.worker_info.max_model_len
        self.histograms = {
            name: PrometheusHistogram(bucket_bounds(name, most)) for name in HISTOGRAM_HELP
        }
        self.finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.refusals: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()
        self._engine_values: list[Metric | Vector | EngineHistogram] = []
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def watch_event_loop(self) -> None:
        """Measure for ever how late the event loop wakes a task."""
        loop = asyncio.get_running_loop()
        lag = self.histograms["nanovllm:event_loop_lag_seconds"]
        while True:
            due = loop.time() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            lag.observe(max(0.0, loop.time() - due))

    async def render(self) -> bytes:
        self._engine_values = await self._llm.get_metrics()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        model = {"model_name": self._labels["model_name"]}
        for metric in self._engine_values:
            yield self._engine_family(metric)
        for name, histogram in self.histograms.items():
            yield self._histogram(name, HISTOGRAM_HELP[name], histogram.buckets(), histogram.sum)
        text = "Continuations that ended, by finish reason."
        finished = {(reason,): count for reason, count in self.finished.items()}
        name = "vllm:request_success"
        yield filled(CounterMetricFamily, name, text, finished, self._labels, "finished_reason")
        refused = {(reason,): count for reason, count in self.refusals.items()}
        name = "nanovllm:refused_requests"
        yield filled(CounterMetricFamily, name, "Requests refused.", refused, model, "reason")
        yield http_requests(self.answers, model)
        yield self._cache_info()
        weights = self._llm.engine.weights
        level = 0 if weights is None else weights.sleep_level
        text = "1 is the state that the engine is in: level 1 keeps the weights elsewhere."
        states = enumerate(("awake", "weights_offloaded", "discard_all"))
        found = {(state,): float(index == level) for index, state in states}
        name = "vllm:engine_sleep_state"
        yield filled(GaugeMetricFamily, name, text, found, self._labels, "sleep_state")

    def _engine_family(self, metric: Metric | Vector | EngineHistogram) -> Family:
        text = ENGINE_HELP.get(metric.name, "Of the engine.")
        if isinstance(metric, Vector):
            counts = {(str(position),): count for position, count in enumerate(metric.values)}
            return filled(CounterMetricFamily, metric.name, text, counts, self._labels, "position")
        if isinstance(metric, EngineHistogram):
            return self._histogram(metric.name, text, [*metric.buckets.items()], metric.sum)
        kind = GaugeMetricFamily if isinstance(metric, Gauge) else CounterMetricFamily
        return filled(kind, metric.name, text, {(): metric.value}, self._labels)

    def _histogram(
        self, name: str, text: str, buckets: Seq[tuple[str, float]], total: float
    ) -> Family:
        family = HistogramMetricFamily(name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], buckets, total)
        return family

    def _cache_info(self) -> Family:
        """Return the sizes of the KV cache as labels of a gauge that is always 1."""
        config = self._llm.engine.config
        info = self._llm.engine.worker_info
        labels = {
            "block_size": str(info.block_size),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
            "num_gpu_blocks": str(info.num_blocks),
            "engine": "0",
        }
        return InfoMetricFamily("vllm:cache_config", "Sizes of the KV cache.", labels)


def filled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    counts: Mapping[Any, float],
    labels: Mapping[str, str],
    *more: str,
) -> Family:
    """Return a family with `labels`, and the labels `more`, of which `counts` has tuples."""
    family = kind(name, text, labels=[*labels, *more])
    for values, count in counts.items():
        family.add_metric([*labels.values(), *values], count)
    return family


def http_requests(answers: Mapping[tuple[str, int], int], labels: Mapping[str, str]) -> Family:
    """Return how many HTTP requests were answered, by path and status."""
    counts = {(path, str(status)): count for (path, status), count in answers.items()}
    name = "nanovllm:http_requests"
    return filled(CounterMetricFamily, name, "HTTP requests.", counts, labels, "path", "status")


class RequestMeter:
    """Counts one request of the engine: give it each output, and leave its `with` block at the end.

    A request that is left before its last output was aborted, or had an error; one that the engine
    refused to take is not counted. The counts are by continuation, as in vLLM; the times of
    continuations are those of their request. `record` is the HTTP request's.
    """

    def __init__(
        self, metrics: ServerMetrics, params: SamplingParams, record: RequestRecord | None = None
    ) -> None:
        self._metrics = metrics
        self._params = params
        self._record = record or RequestRecord("")
        self._start = time.monotonic()
        self._num_tokens = [0] * params.n  # by continuation
        self._last_token: list[float | None] = [None] * params.n  # time of its last token
        self._unfinished = set(range(params.n))
        self._last: RequestOutput | None = None

    def __enter__(self) -> "RequestMeter":
        return self

    def observe(self, output: RequestOutput) -> None:
        """Count a delta of a stream, or the whole output."""
        metrics = output.metrics
        if self._last is None:
            self._observe("request_params_n", self._params.n)
            self._observe("request_params_max_tokens", self._params.max_tokens)
            self._record.num_prompt_tokens += len(output.prompt_token_ids)
        had_token = self._last is not None and self._last.metrics.first_token_time is not None
        if metrics.time_to_first_token is not None and not had_token:
            seconds = metrics.time_to_first_token
            self._observe("time_to_first_token_seconds", seconds)
            shortest = min(seconds, self._record.time_to_first_token or seconds)
            self._record.time_to_first_token = shortest
        self._last = output
        for completion in output.outputs:
            if completion.token_ids:
                self._count_tokens(completion, metrics)
            if completion.finish_reason is not None:
                self._finish(completion.index, completion.finish_reason)
                self._record.finish_reasons[completion.finish_reason] = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, InvalidRequestError):
            return
        is_error = kind is not None and issubclass(kind, NanoVLLMError)
        for index in list(self._unfinished):
            self._finish(index, "error" if is_error else "abort")

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self._metrics.histograms[f"vllm:{name}"].observe(value, times)

    def _count_tokens(self, completion: CompletionOutput, metrics: RequestMetrics) -> None:
        """Count new tokens, each with its share of the time since the one before."""
        index = completion.index
        num_new = len(completion.token_ids)
        self._num_tokens[index] += num_new
        self._record.num_output_tokens += num_new
        start = self._last_token[index]
        end = metrics.last_token_time
        if start is None:  # the first token follows no other
            start = metrics.first_token_time
            num_new -= 1
        if num_new and start is not None and end is not None:
            self._observe("inter_token_latency_seconds", (end - start) / num_new, num_new)
        self._last_token[index] = end

    def _finish(self, index: int, reason: str) -> None:
        self._unfinished.discard(index)
        self._metrics.finished[reason] += 1
        now = time.monotonic()
        num_tokens = self._num_tokens[index]
        known = RequestMetrics(self._start) if self._last is None else self._last.metrics
        scheduled = known.first_scheduled_time
        self._observe("e2e_request_latency_seconds", now - known.arrival_time)
        self._observe("request_queue_time_seconds", (scheduled or now) - known.arrival_time)
        first = known.first_token_time
        last = self._last_token[index]
        if scheduled is not None:
            self._observe("request_prefill_time_seconds", (first or now) - scheduled)
            self._observe("request_inference_time_seconds", (last or now) - scheduled)
        if first is not None and last is not None:
            self._observe("request_decode_time_seconds", last - first)
            if num_tokens > 1:
                per_token = (last - first) / (num_tokens - 1)
                self._observe("request_time_per_output_token_seconds", per_token)
        if self._last is not None:
            num_prompt_tokens = len(self._last.prompt_token_ids)
            self._observe("request_prompt_tokens", num_prompt_tokens)
            computed = num_prompt_tokens - self._last.num_cached_tokens
            self._observe("request_prefill_kv_computed_tokens", computed)
        self._observe("request_generation_tokens", num_tokens)
        if not self._unfinished:
            self._observe("request_max_num_generation_tokens", max(self._num_tokens))


class _Page(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def merge(texts: Mapping[str, str], label: str, own: Iterable[Family] = ()) -> bytes:
    """Return the samples of all texts, by name, in Prometheus' format; `label` says whose each is.

    Args:
        own: families of the server itself, some of which the texts may have, too.
    """
    families: dict[str, Family] = {}

    def named(family: Family) -> Family:
        new = Family(family.name, family.documentation, family.type)
        return families.setdefault(family.name, new)

    for name, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {**sample.labels, label: name}
                named(family).samples.append(sample._replace(labels=labels))
    for family in own:
        named(family).samples += family.samples
    return generate_latest(_Page(families.values()))
