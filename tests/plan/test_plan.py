"""Requests are read and made, costs are fitted, and a plan answers."""

import json
import os
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import bench
from nanovllm import demo_model
from nanovllm.apps.cli.main import main
from nanovllm.apps.plan.calibrate import calibrate
from nanovllm.apps.plan.fleet import Fleet
from nanovllm.apps.plan.options import MadeRequests, Objective, PlanOptions
from nanovllm.apps.plan.plan import plan
from nanovllm.apps.plan.planned_requests import (
    MOONCAKE_BLOCK,
    PlannedRequest,
    Run,
    made,
    read_trace,
)
from nanovllm.apps.plan.step_cost import KNOTS, StepCost, StepWork, fit, work_of
from nanovllm.core.messages import Row
from nanovllm.core.worker_info import KVInfo, TierInfo, WindowSpec, WorkerInfo
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config

DOCS = Path(__file__).parents[2] / "docs"
INFO = WorkerInfo(
    num_blocks=4096, block_size=64, max_model_len=4096, vocab_size=1000, max_num_batched_tokens=2048
)
OPTIONS = {"model": "a model", "max_num_seqs": 64}
COST = StepCost(
    tuple(0.01 + 0.0002 * knot for knot in KNOTS), 0.0, 1e-5, 1e-5, 1e-9, 1e-9, INFO, OPTIONS
)
TRACES = {
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:05.4799600,10,1\n",
        [(0.0, 374, 44), (1.5, 10, 1)],
    ),
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "6,GPT-4,9,0,9,API log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n",
        [(0.0, 472, 18), (40.0, 1087, 230)],
    ),
    "mooncake": (
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 30482, "input_length": 512, "output_length": 5, "hash_ids": [46]}\n',
        [(0.0, 600, 52), (3.0, 512, 5)],
    ),
    "nanovllm": (
        "2026-11-30 10:00:00,500 INFO nanovllm.apps: id=a status=200 duration=0.5 "
        "prompt_tokens=30 output_tokens=7 finish=stop\n"
        "2026-11-30 10:00:01,000 INFO nanovllm.apps: id=b status=404 duration=0.1\n"
        '{"time": "2026-11-30T10:00:02.000Z", "request": {"duration": 1.0, "prompt_tokens": 4, '
        '"output_tokens": 9}}\n',
        [(0.0, 30, 7), (1.0, 4, 9)],
    ),
}


@pytest.mark.parametrize("form", TRACES)
def test_traces(tmp_path: Path, form: str) -> None:
    text, expected = TRACES[form]
    path = tmp_path / "trace"
    path.write_text(text)
    found = list(read_trace(path))
    assert [
        (round(each.arrival, 3), len(each.token_ids), each.num_output) for each in found
    ] == expected
    if form == "mooncake":
        first, second = (each.token_ids for each in found)
        assert first[:MOONCAKE_BLOCK] == second
    faster = read_trace(path, 2.0)
    assert [each.arrival for each in faster] == [pytest.approx(a / 2) for a, _, _ in expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,374\n", "no column 'Gener"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,374,1\n", "row 1: Invalid"),
        ("Timestamp,Request tokens,Response tokens\n5,0,1\n", "row 1: the prompt's"),
        ('{"timestamp": 0, "input_length": 600}\n', "no column 'hash_ids'"),
        ('{"input_length": 1}{}\n', "row 1: Extra data"),
        ("nothing\n", "has no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        (
            "Timestamp,Request tokens,Response tokens\n5,1,1\n4,1,1\n",
            "a request at 4 s comes before",
        ),
    ],
)
def test_a_wrong_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(read_trace(path))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(tmp_path / "none"))


def test_made_requests() -> None:
    options = MadeRequests(num_requests=3000, rate=5.0, num_turns=3, shared_len=100, num_groups=2)
    found = list(made(options))
    assert len(found) == 3000
    arrivals = [each.arrival for each in found]
    assert arrivals == sorted(arrivals)
    assert found == list(made(options))
    assert 3000 / arrivals[-1] == pytest.approx(5.0, rel=0.15)
    by_conversation: dict[str, list[Any]] = {}
    for each in found:
        by_conversation.setdefault(each.conversation, []).append(each)
    talk = next(turns for turns in by_conversation.values() if len(turns) == 3)
    first, second, third = (each.token_ids for each in talk)
    answer = [talk[0].output_token] * talk[0].num_output
    assert second[: len(first) + len(answer)] == first + answer
    assert third[: len(second)] == second
    assert {each.prompt[0].token_id for each in found} == {0, 1}


def test_work() -> None:
    rows = [Row(0, 0, 10, 1, samples=True), Row(1, 1, 4, 3, samples=False)]
    assert work_of(rows) == StepWork(4, 1, 2, 1, 11 + 7, 11 + 5 + 6 + 7)


def test_a_cost_is_found_again(tmp_path: Path) -> None:
    rng = random.Random(0)
    works = []
    for _ in range(400):
        rows = rng.randint(1, 64)
        tokens = max(rows, int(2 ** rng.uniform(0, 11)))
        keys = rows * rng.randint(1, 2000)
        works.append(StepWork(tokens, int(tokens > rows), rows, rows, keys, keys * tokens // rows))
    seconds = [COST.seconds(work) * rng.uniform(0.98, 1.02) for work in works]
    windows = KVInfo((WindowSpec(64, 2),))
    info = WorkerInfo(8, 64, 512, 100, 64, kv=windows, tiers=TierInfo(4, "a", 0.1, 0.2))
    found = fit(works, seconds, info, OPTIONS, "made")
    assert found.error[0] < 0.02
    assert found.error[1] < 0.05
    found.save(tmp_path / "cost.json")
    assert StepCost.load(tmp_path / "cost.json") == found


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"info": {}}'])
def test_a_wrong_cost_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not what `nanovllm lab calibrate` writes"):
        StepCost.load(path)
    with pytest.raises(ConfigError, match="make it by"):
        StepCost.load(tmp_path / "none")


def answers(tmp_path: Path, how: dict[str, Any], requests: MadeRequests) -> list[dict[str, Any]]:
    COST.save(tmp_path / "cost.json")
    options = PlanOptions(cost=str(tmp_path / "cost.json"), **how)
    return plan(options, requests, Objective(slo_ttft=1.0, slo_tpot=0.1), lambda words: None)


def test_one_request_takes_its_steps(tmp_path: Path) -> None:
    requests = MadeRequests(num_requests=1, prompt_len=100, output_len=10, spread=0.0)
    [found] = answers(tmp_path, {}, requests)
    prompt = COST.seconds(StepWork(100, 1, 1, 1, 100, 5050))
    steps = [COST.seconds(StepWork(1, 0, 1, 1, end, end)) for end in range(101, 110)]
    assert found["ttft"]["p50"] == pytest.approx(prompt)
    assert found["e2e"]["p99"] == pytest.approx(prompt + sum(steps))
    assert found["tpot"]["p50"] == pytest.approx(sum(steps) / 9)
    assert found["meets_slo"]


def test_the_fewest_replicas(tmp_path: Path) -> None:
    requests = MadeRequests(num_requests=400, rate=12.0, prompt_len=300, output_len=60)
    found = answers(tmp_path, {"replicas": "1..16"}, requests)
    good = {each["replicas"]: each["meets_slo"] for each in found}
    fewest = min(number for number, meets in good.items() if meets)
    assert fewest > 1
    assert not good[fewest - 1]
    assert all(meets == (number >= fewest) for number, meets in good.items())


def test_options_beside(tmp_path: Path) -> None:
    requests = MadeRequests(num_requests=200, rate=4.0, shared_len=1000)
    how = {"beside": ["enable_prefix_caching=false", "num_blocks=512"]}
    with_cache, without = answers(tmp_path, how, requests)
    assert with_cache["cached_share"] > 0.4
    assert without["cached_share"] == 0
    assert with_cache["ttft"]["p50"] < without["ttft"]["p50"]
    assert without["kv_used"] > with_cache["kv_used"]


def test_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"replicas": "17"}
    requests = MadeRequests(num_requests=400, rate=100.0, shared_len=300, num_turns=3)
    found = []
    for num_cores in (1, 2):
        monkeypatch.setattr(os, "cpu_count", lambda number=num_cores: number)
        found += answers(tmp_path, how, requests)
    alone, shared = found
    for summed in ("busy", "kv_used"):  # in another order
        assert alone[summed] > 0
        assert alone.pop(summed) == pytest.approx(shared.pop(summed))
    assert alone == shared
    with pytest.raises(ConfigError, match="max_model_len=.*, but it is 4096"):
        answers(tmp_path, how, MadeRequests(num_requests=50, prompt_len=4000, spread=0.1))


def test_the_h200_that_was_measured() -> None:
    """Its steps were fitted to 13 of its page; the page's nano-vllm run was not."""
    page = (DOCS / "benchmarks" / "h200.md").read_text()
    measured = re.search(r"the median is \*\*([\d,]+) output tokens/s", page)
    assert measured is not None
    cost = StepCost.load(DOCS / "benchmarks" / "h200-qwen3-0.6b-steps.json")
    prompts, lengths = bench.workload(256, (100, 1024), (100, 1024), 0)
    requests = [
        PlannedRequest(0.0, tuple(Run(token, 1) for token in prompt), length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    fleet = Fleet(cost, Objective())
    found = fleet.outcome(requests, 1)["output_tokens_per_second"]
    assert found == pytest.approx(int(measured[1].replace(",", "")), rel=0.1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    COST.save(tmp_path / "cost.json")
    words = ["lab", "plan", "--cost", str(tmp_path / "cost.json"), "--num-requests", "50"]
    output, page = tmp_path / "out.json", tmp_path / "page.html"
    assert main([*words, "--output", str(output), "--page", str(page), "--replicas", "1..2"]) == 0
    assert "enough replicas for the objective: 1" in capsys.readouterr().out
    assert len(json.loads(output.read_text())) >= 1
    assert "<svg" in page.read_text()
    assert main([*words, "--slo-ttft", "0"]) == 1
    assert "too few replicas for the objective: 1" in capsys.readouterr().out
    for wrong, message in (
        (["--replicas", "0"], "from 1 to"),
        (["--option", "num_blokcs=1"], "num_blocks"),
        (["--prompt-len", "5000", "--spread", "0"], "max_model_len=5128, but it is 4096"),
        (["--option", "num_blocks=9"], "num_blocks=1"),
        (["--page", str(tmp_path)], "is a directory"),
        (["--output", str(tmp_path / "none" / "out.json")], "cannot be written"),
    ):
        assert main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_calibrated(tmp_path: Path) -> None:
    told: list[str] = []
    config = Config(model=demo_model.MODEL, max_num_seqs=16)
    cost = calibrate(config, 1.5, told.append)
    assert told
    assert cost.error[0] < 1
    assert cost.seconds(StepWork(512, 1, 1, 1, 512, 512 * 256)) > cost.seconds(
        StepWork(1, 0, 1, 1, 512, 512)
    )
    cost.save(tmp_path / "cost.json")
    options = PlanOptions(cost=str(tmp_path / "cost.json"))
    requests = MadeRequests(num_requests=20, prompt_len=50, output_len=10)
    [found] = plan(options, requests, Objective(), told.append)
    assert found["requests"] == 20
    assert found["e2e"]["p50"] > 0


def test_requests_stream() -> None:
    first = list(islice(made(MadeRequests(num_requests=10**9)), 5))
    assert len(first) == 5
