"""The timeline of `Config.trace`, read back as JSON."""

import json
import os
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ConfigError
from nanovllm.factory import make_engine
from nanovllm.features.observe import trace as trace_module
from nanovllm.options.config import Config
from nanovllm.testing.fake_engine import fake_controller
from tests.helpers import generate, generate_in_random_order, random_prompt

Event = dict[str, Any]
SMALL = {"dtype": "float32", "max_model_len": 48, "kvcache_block_size": 4}
MICROSECOND = 0.0015
"""Times are rounded to nanoseconds."""


def read(path: Path) -> list[Event]:
    events = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(events, list)
    return events


def spans(events: list[Event], pid: int) -> dict[int, list[Event]]:
    """Return the complete events ("X") by lane, in order."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            found[event["tid"]].append(event)
    for lane in found.values():
        lane.sort(key=lambda event: event["ts"])
    return found


def sequences(events: list[Event]) -> list[Event]:
    """Return each sequence as its span's arguments, with `start`, `end` and `states`.

    Checks that the spans of a lane do not overlap, and that the states cover the sequence.
    """
    lanes: dict[int, list[Event]] = defaultdict(list)
    found = []
    for event in events:
        if event["ph"] not in "BE" or event["pid"] != 2:
            continue
        stack = lanes[event["tid"]]
        if event["ph"] == "B":
            assert len(stack) < 2, "a state within a state"
            stack.append({**event["args"], "name": event["name"], "start": event["ts"]})
            continue
        span = stack.pop()
        span |= {**event["args"], "end": event["ts"], "lane": event["tid"]}
        assert span["end"] >= span["start"]
        if stack:
            states = stack[0].setdefault("states", [])
            assert span["start"] == (states[-1]["end"] if states else stack[0]["start"])
            states.append(span)
        else:
            assert span["states"][-1]["end"] == span["end"]
            found.append(span)
    assert not any(lanes.values()), "a span has no end"
    last: dict[int, float] = {}
    for span in found:  # in the order of their ends
        assert span["start"] >= last.get(span["lane"], 0.0), "two sequences share a lane"
        last[span["lane"]] = span["end"]
    return found


def check_steps(events: list[Event]) -> list[Event]:
    """Return the steps; check that neither they nor the phases of the host overlap."""
    lanes = spans(events, 1)
    for lane in lanes.values():
        for span, following in pairwise(lane):
            assert span["ts"] + span["dur"] <= following["ts"] + MICROSECOND
    steps = [span["args"] for span in lanes[2]]
    assert all(step["rows"] == step["prefill_rows"] + step["decode_rows"] for step in steps)
    return steps


def run(engine: LLMEngine) -> None:
    while not engine.is_finished():
        engine.step()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.mark.parametrize(("queue_depth", "drafts"), [(0, False), (1, True)])
def test_random_load(
    random_model: str,
    path: Path,
    queue_depth: int,
    drafts: bool,
    preempted: list[tuple[int, int]],
) -> None:
    """With chunks, n, priorities, preemption and aborts, and with speculation."""
    config = Config(
        model=random_model,
        num_kvcache_blocks=24,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        trace_file=str(path),
        speculative_config={"method": "ngram"} if drafts else None,
        **SMALL,
    )
    engine = make_engine(config, queue_depth=queue_depth)
    if drafts:
        engine.scheduler.drafting.controller = fake_controller(lambda most: min(most, 3))
    rng = random.Random(1)
    requests: list[Any] = [
        (
            random_prompt(rng, rng.randint(1, 30)),
            SamplingParams(
                0,
                rng.randint(1, 12),
                ignore_eos=True,
                n=rng.choice([1, 1, 3]),
                allowed_token_ids=[3],  # so that drafts are found
            ),
        )
        for _ in range(30)
    ]
    outputs = generate_in_random_order(engine, requests, seed=2)
    stats = engine.stats
    engine.shutdown()

    events = read(path)
    found = sequences(events)
    ended = [seq for seq in found if seq["finish_reason"] != "abort"]
    completions = [completion for output in outputs for completion in output.outputs]
    assert len(ended) == len(completions)
    assert sum(seq["output_tokens"] for seq in ended) == sum(len(c.token_ids) for c in completions)
    assert sum(seq["output_tokens"] for seq in found) == stats.num_decode_tokens
    assert sum(seq["preemptions"] for seq in found) == len(preempted) > 0
    for seq in found:
        names = [state["name"] for state in seq["states"]]
        assert names[0] == "waiting"
        assert names.count("preempted") == seq["preemptions"]
        assert sum(state.get("output_tokens", 0) for state in seq["states"]) == seq["output_tokens"]
        if seq["preemptions"] == 0 and seq["finish_reason"] == "length":
            computed = sum(state["tokens"] for state in seq["states"] if state["name"] == "prefill")
            assert computed + seq["cached_tokens"] == seq["prompt_tokens"]
            assert ("decode" in names) == (seq["output_tokens"] > 1)
    chunks = [s for seq in found for s in seq["states"] if s["name"] == "prefill"]
    assert len(chunks) > len(found), "no prompt was computed in chunks"
    steps = check_steps(events)
    prefilled = sum(chunk["tokens"] for chunk in chunks)
    assert sum(step["prefill_tokens"] for step in steps) == prefilled
    assert sum(step["output_tokens"] for step in steps) >= stats.num_decode_tokens
    proposed = sum(step.get("drafts_proposed", 0) for step in steps)
    if drafts:
        assert proposed >= engine.scheduler.drafting.counts.num_draft_tokens
    assert (proposed > 0) == drafts


def test_counters_begin_and_end_idle(make_llm: Any, random_model: str, path: Path) -> None:
    llm = make_llm(random_model, trace_file=path, max_num_seqs=1, **SMALL)
    llm.generate([[1, 2, 3]] * 3, SamplingParams(0, 8, ignore_eos=True), use_tqdm=False)
    events = read(path)  # the file is whole while the engine lives
    counters: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    assert max(c["waiting"] for c in counters["sequences"]) == 2
    assert counters["sequences"][-1] == {"running": 0, "waiting": 0}
    assert max(c["percent used"] for c in counters["KV cache"]) > 0
    assert counters["KV cache"][-1] == {"percent used": 0.0}
    assert max(c["output"] for c in counters["tokens/s"]) > 0
    assert counters["tokens/s"][-1] == {"prompt": 0.0, "output": 0.0}
    found = sequences(events)
    assert [seq["name"] for seq in found] == ["0", "1", "2"]
    assert [seq["states"][0]["name"] for seq in found] == ["waiting"] * 3
    phases = [span["name"] for span in spans(events, 1)[1]]
    assert phases[:4] == ["schedule", "launch", "wait", "process"]


def test_ends_are_those_of_the_outputs(make_llm: Any, path: Path) -> None:
    """Symptom: a stop string in the last allowed token is traced as "length"."""
    llm = make_llm(demo_model.MODEL, trace_file=path, **SMALL)
    question = demo_model.entries()[0][0]
    free = SamplingParams(0, 4, n=2)
    (whole,) = llm.generate(question, free, use_tqdm=False)
    text = whole.outputs[0].text
    params = [free, free.clone(stop=text[-1:], min_tokens=4)]
    outputs = llm.generate([question] * 2, params, use_tqdm=False)
    reasons = [completion.finish_reason for o in outputs for completion in o.outputs]
    assert reasons == ["length"] * 2 + ["stop"] * 2
    traced = [seq["finish_reason"] for seq in sequences(read(path))[2:]]
    assert sorted(traced) == sorted(reasons)


def test_names_are_escaped(make_llm: Any, random_model: str, path: Path) -> None:
    llm = make_llm(random_model, trace_file=path, **SMALL)
    name = 'a "name"\n\\ \x00 é \ud800'
    llm.engine.add_request([1, 2], SamplingParams(max_tokens=1), request_id=name)
    run(llm.engine)
    assert [seq["name"] for seq in sequences(read(path))] == [name]


def test_a_failed_step(
    make_llm: Any, random_model: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences of the step lost their KV; they go on or are aborted."""
    llm = make_llm(random_model, trace_file=path, **SMALL)
    engine, execute, num_steps = llm.engine, llm.engine.executor.execute, 0

    def failing(schedule: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise OSError("for the test")
        return execute(schedule)

    monkeypatch.setattr(engine.executor, "execute", failing)
    params = SamplingParams(0, 8, ignore_eos=True)
    kept, aborted = (engine.add_request([1, 2, 3], params) for _ in range(2))
    with pytest.raises(OSError, match="for the test"):
        run(engine)
    engine.abort(aborted)
    run(engine)
    events = read(path)
    assert [event["name"] for event in events if event["ph"] == "i"] == ["step failed"]
    first, second = sequences(events)
    assert (first["name"], first["finish_reason"]) == (str(aborted), "abort")
    assert (second["name"], second["finish_reason"]) == (str(kept), "length")
    names = [state["name"] for state in second["states"]]
    assert names == ["waiting", "prefill", "decode", "preempted", "prefill", "decode"]
    check_steps(events)


def test_an_abort_while_nothing_runs_is_written(
    make_llm: Any, random_model: str, path: Path
) -> None:
    llm = make_llm(random_model, trace_file=path, **SMALL)
    llm.engine.abort(llm.engine.add_request([1, 2, 3]))
    (seq,) = sequences(read(path))
    assert seq["finish_reason"] == "abort"
    assert [state["name"] for state in seq["states"]] == ["waiting"]


def test_the_file_is_whole_after_each_write(
    make_llm: Any, random_model: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the trace of a process that was killed can be read; and memory is bounded."""
    monkeypatch.setattr(trace_module, "_MAX_PENDING", 20)
    llm = make_llm(random_model, trace_file=path, **SMALL)
    [trace] = llm.engine.observers
    llm.engine.add_request([1, 2, 3], SamplingParams(0, 40, ignore_eos=True))
    sizes = []
    while not llm.engine.is_finished():
        llm.engine.step()
        assert len(trace._file.pending) < 20
        if path.stat().st_size:
            sizes.append(len(read(path)))
    assert len(set(sizes)) > 5
    assert sizes == sorted(sizes)


def test_shutdown_ends_what_runs(make_llm: Any, random_model: str, path: Path) -> None:
    llm = make_llm(random_model, trace_file=path, **SMALL)
    llm.engine.add_request([1, 2, 3])
    llm.engine.step()
    llm.shutdown()
    assert [seq["finish_reason"] for seq in sequences(read(path))] == [None]


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    make_llm: Any, random_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(random_model, trace_file="/dev/full", **SMALL)
    for _ in range(2):
        assert len(generate(llm, [1, 2, 3], SamplingParams(max_tokens=5)).token_ids) == 5
    assert caplog.text.count("the trace ends here") == 1


def test_a_new_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path, umask = tmp_path / "trace.json", os.umask(0)
    try:
        trace_module.Trace(str(path)).close()
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written(random_model: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "trace.json"
    with pytest.raises(ConfigError, match=r"trace must be a file that can be written, got .*: No"):
        LLM(random_model, trace_file=missing)
