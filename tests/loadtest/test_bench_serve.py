"""`nanovllm bench serve`: its arithmetic by hand, and loads on a server with known delays."""

import asyncio
import importlib.util
import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm.cli import main as cli
from nanovllm.errors import ConfigError
from nanovllm.loadtest.bench_serve import measure
from nanovllm.loadtest.load_plan import CHAT_COMPLETIONS, LoadPlan, make_conversations, make_warmups
from nanovllm.loadtest.load_report import Client, Measurement, Report, percentile
from nanovllm.loadtest.sse_client import find_server
from tests.wire_server import (
    Asked,
    Step,
    WireServer,
    chat_event,
    streamed,
    text_event,
    usage_event,
    whole,
)

QUICK = Client(0.001, 0.2)


def measurement(start: float, gaps: list[float], num_tokens: int) -> Measurement:
    """Return a request whose events come after these waits."""
    times = [start + sum(gaps[: number + 1]) for number in range(len(gaps))]
    return Measurement(start - 0.01, start, times, times[-1], 10, num_tokens, True)


def test_latencies_are_those_of_the_definitions() -> None:
    item = measurement(100.0, [0.5, 0.1, 0.3], num_tokens=5)
    assert item.ttft == pytest.approx(0.5)
    assert item.itls == pytest.approx([0.1, 0.3])
    assert item.tpot == pytest.approx(0.4 / 4), "an event may hold several tokens"
    assert item.e2el == pytest.approx(0.9)
    assert measurement(1.0, [0.5], num_tokens=1).tpot == 0


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(count: int) -> None:
    numbers = sorted(random.Random(count).random() for _ in range(count))
    for percent in (0, 25, 50, 90, 95, 99, 99.5, 100):
        assert percentile(numbers, percent) == pytest.approx(np.percentile(numbers, percent))
    assert percentile([], 50) == 0


def test_report_adds_up() -> None:
    measured = [
        measurement(10.0, [0.1, 0.02, 0.02], 3),
        measurement(10.1, [0.3, 0.02, 0.02], 3),
        measurement(10.2, [0.1, 0.2, 0.2], 3),
        Measurement(10.0, 10.0, end=10.3, error="full"),
    ]
    plan = LoadPlan(goodput=("ttft:200", "tpot:50"))
    report = Report(plan, measured, 2.0, QUICK)
    found = report.as_json()
    assert (found["completed"], found["failed"]) == (3, 1)
    assert found["request_throughput"] == 1.5
    assert found["request_goodput"] == 0.5, "one is late to begin, one is slow"
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 9)
    assert found["output_throughput"] == 4.5
    assert found["total_token_throughput"] == 19.5
    assert found["max_concurrent_requests"] == 3
    assert found["mean_ttft_ms"] == pytest.approx(500 / 3)
    assert found["median_ttft_ms"] == pytest.approx(100)
    assert found["p99_ttft_ms"] == pytest.approx(np.percentile([100, 300, 100], 99))
    assert found["mean_tpot_ms"] == pytest.approx(80)
    assert found["p90_itl_ms"] == pytest.approx(np.percentile([20] * 4 + [200] * 2, 90))
    assert found["mean_e2el_ms"] == pytest.approx((140 + 340 + 500) / 3)
    assert found["errors"] == ["", "", "", "full"]
    json.dumps(found, allow_nan=False)
    text = report.as_text()
    for line in (
        "3 completed, 1 failed in 2.00 s, at most 3 at once",
        "1.50 requests/s, 4.5 output tokens/s, 19.5 tokens/s",
        "0.50 requests/s, 25.0% of all, within ttft:200 tpot:50",
        "failed 1 times: full",
    ):
        assert line in text


def test_a_slow_client_says_so() -> None:
    assert QUICK.warning is None
    assert "late: its event loop by 50 ms (p99), with 10% of a core" in str(
        Client(0.05, 0.1).warning
    )
    assert "with 99% of a core" in str(Client(0.0, 0.99).warning)


def test_a_load_without_answers_has_a_report() -> None:
    report = Report(LoadPlan(), [Measurement(0.0, 1.0, end=1.5, error="no")], 0.5, QUICK)
    assert "0 completed, 1 failed" in report.as_text()
    json.dumps(report.as_json(), allow_nan=False)


def test_arrivals_are_a_poisson_process() -> None:
    plan = LoadPlan(num_prompts=4000, request_rate=50.0, random_input_len=1)
    arrivals = [conversation.arrival for conversation in make_conversations(plan)]
    gaps = np.diff([0.0, *arrivals])
    assert arrivals[-1] == pytest.approx(80.0)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    even = LoadPlan(num_prompts=4000, request_rate=50.0, random_input_len=1, burstiness=100.0)
    gaps = np.diff([conversation.arrival for conversation in make_conversations(even)])
    assert gaps.std() == pytest.approx(gaps.mean() / 10, rel=0.1)
    assert {c.arrival for c in make_conversations(LoadPlan(num_prompts=5))} == {0.0}


def test_prompts_have_the_lengths_and_share_prefixes() -> None:
    options: dict[str, Any] = {"num_prompts": 60, "random_prefix_len": 8, "num_prefixes": 3}
    options |= {"random_input_len": 20, "random_output_len": 10, "random_range_ratio": 0.5}
    plan = LoadPlan(**options)
    drawn = make_conversations(plan)
    prompts = [conversation.prompts[0] for conversation in drawn]
    assert {len(prompt) for prompt in prompts} == set(range(18, 39))
    assert {conversation.output_lens[0] for conversation in drawn} == set(range(5, 16))
    prefixes = Counter(tuple(prompt[:8]) for prompt in prompts)
    assert list(prefixes.values()) == [20, 20, 20]
    assert len({tuple(prompt) for prompt in prompts}) == 60
    assert drawn == make_conversations(plan)
    assert drawn != make_conversations(LoadPlan(**options, seed=1))
    (warmup,) = make_warmups(plan)
    assert tuple(warmup.prompts[0][:8]) not in prefixes
    (chat, *_) = make_conversations(LoadPlan(**options, endpoint=CHAT_COMPLETIONS, num_turns=3))
    assert len(chat.prompts) == 3
    assert all(isinstance(prompt, str) for prompt in chat.prompts)
    assert 18 <= len(str(chat.prompts[0]).split()) <= 38


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "num_prompts must be an integer >= 1, got 0"),
        ({"request_rate": 0.0}, "request_rate must be above 0"),
        ({"request_rate": math.nan}, "request_rate must be above 0"),
        ({"burstiness": math.inf}, "burstiness must be a finite number"),
        ({"random_range_ratio": 1.0}, "at least 0 and below 1, got 1.0"),
        ({"endpoint": "/v1/embeddings"}, "endpoint must be like /v1/completions or"),
        ({"num_turns": 2}, "num_turns above 1 needs --endpoint /v1/chat/completions"),
        ({"goodput": ("ttft",)}, "goodput must be like ttft:200"),
        ({"goodput": ("itl:5",)}, "goodput must be like ttft:200"),
        ({"goodput": ("ttft:-5",)}, "goodput must be like ttft:200"),
        ({"extra_body": [1]}, "extra_body must be a JSON object"),
        ({"max_concurrency": 0}, "max_concurrency must be an integer >= 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadPlan(**options)


def run(wire: WireServer, **options: Any) -> Report:
    """Put a load on the server, as `bench serve` does."""
    plan = LoadPlan(**{"model": "m", "random_input_len": 4, "num_warmups": 0, **options})
    return asyncio.run(measure(plan, find_server(wire.url)))


def answer(_: Asked, cut: int = 0) -> list[Step]:
    """Answer after 60 ms, with a second event 40 ms later and a third 20 ms after that."""
    return streamed(
        (0.06, text_event("a")),
        (0.04, text_event("b")),
        (0.02, text_event("", "length")),
        (0.0, usage_event(4, 3)),
        cut=cut,
    )


@pytest.mark.parametrize("cut", [0, 7])
def test_measured_times_are_those_of_the_server(cut: int) -> None:
    with WireServer(lambda asked: answer(asked, cut)) as wire:
        report = run(wire, num_prompts=8, max_concurrency=4, num_warmups=2)
        assert len(wire.asked) == 10, "warm-ups are not counted"
        assert wire.num_connections == 4, "connections are kept"
        assert wire.asked[0].body["stream_options"] == {"include_usage": True}
    assert report.peak == 4
    assert report.errors.total() == 0
    assert report.seconds >= 0.24
    for item in report.measured:
        assert 0.06 <= item.ttft < 1.0
        assert len(item.itls) == 1, "the event of the end has no text"
        assert 0.035 <= item.itls[0] < 0.5
        assert item.e2el >= item.ttft + 0.055
        assert item.tpot == pytest.approx((item.e2el - item.ttft) / 2)
        assert (item.num_prompt_tokens, item.num_output_tokens) == (4, 3)


def test_requests_arrive_at_the_rate() -> None:
    with WireServer(answer) as wire:
        report = run(wire, num_prompts=20, request_rate=50.0, burstiness=1000.0)
    starts = [item.start - report.measured[0].start for item in report.measured]
    assert starts[-1] == pytest.approx(0.38, abs=0.1)
    assert all(item.start >= item.arrival for item in report.measured)
    assert 3 <= report.peak <= 20


def test_failures_are_counted_and_told() -> None:
    kinds = [
        [(0.0, whole(503, {"error": {"message": "the queue is full"}}))],
        [],
        streamed((0, text_event("a")), (0, {"error": {"message": "the engine died"}})),
        streamed((0, text_event("a"))),
        streamed((0, text_event("a", "abort"))),
        streamed((0, "not JSON")),
        streamed((0, {"choices": [{"delta": ["x"]}]})),
        streamed((0, usage_event(4, 0))),
        answer(Asked("", "", {}, None)),
    ]
    answers = iter(kinds)
    with WireServer(lambda _: next(answers)) as wire:
        report = run(wire, num_prompts=len(kinds), max_concurrency=1)
    assert len(report.completed) == 1
    told = "\n".join(report.errors)
    for message in (
        "the server answers 503: the queue is full",
        "closed the connection before its answer ended",
        "reports an error: the engine died",
        "it has no finish_reason",
        "the answer broke off: abort",
        "no JSON object: 'not JSON'",
        "an event of an unknown form",
    ):
        assert message in told


def test_turns_are_sent_with_the_answers_before_them() -> None:
    def script(asked: Asked) -> list[Step]:
        number = len(asked.body["messages"])
        return streamed(
            (0, chat_event(role="assistant", content="")),
            (0.01, chat_event(reasoning_content="Well")),
            (0.01, chat_event(content=f"answer {number}")),
            (0, chat_event("stop")),
            (0, usage_event(number, 2)),
        )

    with WireServer(script) as wire:
        options = {"num_prompts": 3, "num_turns": 3, "endpoint": CHAT_COMPLETIONS}
        report = run(wire, **options, ignore_eos=True, temperature=0.5, extra_body={"top_k": 5})
        bodies = [asked.body for asked in wire.asked]
    assert len(report.completed) == 9
    assert all(len(item.token_times) == 2 for item in report.completed), "reasoning counts"
    assert all(item.ttft >= 0.01 for item in report.completed), "a role is no token"
    last = next(body for body in bodies if len(body["messages"]) == 5)
    roles = [message["role"] for message in last["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert last["messages"][1]["content"] == "answer 1"
    assert last["messages"][3]["content"] == "answer 3"
    assert (last["ignore_eos"], last["temperature"], last["top_k"]) == (True, 0.5, 5)


def test_a_server_without_usage_gets_its_events_counted() -> None:
    with WireServer(lambda _: streamed((0, text_event("a")), (0, text_event("b", "stop")))) as wire:
        report = run(wire, num_prompts=2)
    assert [item.num_output_tokens for item in report.completed] == [2, 2]
    assert "counts no tokens" in report.as_text()


def test_the_loop_measures_its_own_lag() -> None:
    """A server's answer that keeps the event loop busy shows as lag."""
    with WireServer(answer) as wire:
        assert run(wire, num_prompts=4).client.lag < 1.0
        plan = LoadPlan(model="m", num_prompts=4, random_input_len=4, num_warmups=0)

        async def busy() -> Report:
            load = asyncio.create_task(measure(plan, find_server(wire.url)))
            while not load.done():
                time.sleep(0.03)
                await asyncio.sleep(0)
            return load.result()

        report = asyncio.run(busy())
    assert report.client.lag >= 0.02
    assert report.client.warning is not None


def test_command_writes_text_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "load.json"
    flags = ["--num-prompts", "6", "--random-input-len", "4", "--goodput", "ttft:5000", "tpot:5000"]
    with WireServer(answer) as wire:
        flags += ["--url", f"{wire.url}/v1", "--api-key", "secret", "--request-rate", "inf"]
        status = cli.main(["bench", "serve", *flags, "--save-result", str(saved)])
        assert {asked.headers.get("authorization") for asked in wire.asked} == {"Bearer secret"}
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "6 completed, 0 failed" in shown.out
    assert "100.0% of all, within ttft:5000 tpot:5000" in shown.out
    result = json.loads(saved.read_text())
    assert result["model_id"] == "wire-model"
    assert result["request_rate"] == "inf"
    assert [len(gaps) for gaps in result["itls"]] == [1] * 6
    assert "secret" not in saved.read_text() + shown.out + shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench"], "COMMAND is missing"),
        (["bench", "serve", "x"], "bench serve takes flags only, got 'x'"),
        (["bench", "serve", "--num-prompt", "5"], "did you mean '--num-prompts'?"),
        (["bench", "serve", "--num-prompts", "0"], "--num-prompts must be an integer >= 1"),
        (["bench", "serve", "--url", "localhost"], "the server's URL must be like"),
        (["bench", "serve", "--base-url", "localhost"], "the server's URL must be like"),
        (["bench", "serve", "--save-result", "/no/such/x.json"], "there is no directory for"),
    ],
)
def test_bad_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["chat", "--url", "http://a"], "aiohttp", "client"),
        (["bench", "serve"], "aiohttp", "client"),
    ],
)
def test_a_missing_package_is_named(
    arguments: list[str],
    package: str,
    extra: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != package or None)
    assert cli.main(arguments) == 2
    expected = f"nanovllm: {package} is not installed: pip install '.[{extra}]'\n"
    assert capsys.readouterr().err == expected


def test_a_server_that_refuses_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def script(_: Asked) -> list[Step]:
        return [(0.0, whole(400, {"error": {"message": "max_tokens is too large"}}))]

    with WireServer(script) as wire:
        assert cli.main(["bench", "serve", "--url", wire.url]) == 2
    expected = "nanovllm: the first request failed: the server answers 400: max_tokens is too large"
    assert capsys.readouterr().err == f"{expected}\n"


def test_failed_requests_are_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    def script(asked: Asked) -> list[Step]:
        return answer(asked) if len(wire.asked) < 4 else []

    with WireServer(script) as wire:
        flags = ["--url", wire.url, "--num-prompts", "2", "--max-concurrency", "1"]
        assert cli.main(["bench", "serve", *flags, "--random-input-len", "4"]) == 1
    assert "failed 1 times: the server closed" in capsys.readouterr().out


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--request-rate FLOAT", "--goodput NAME:MS", "--ignore-eos", "--save-result TEXT"):
        assert flag in text
