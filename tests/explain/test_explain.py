"""What `nanovllm explain` says is what the engine did, computed here another way."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams, demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.apps.explain.explain import page_of, recorded
from nanovllm.apps.explain.story import Sample, Stage, Story
from nanovllm.apps.explain.terminal import spans
from nanovllm.testing.fake_engine import fake_controller
from tests.glossary import QUESTIONS

SMALL: dict[str, Any] = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 12,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 3,
}
SYSTEM = "You answer questions about the KV cache of paged attention. "


@pytest.fixture(scope="module")
def llm() -> LLM:
    """An engine whose pool is too small for three long sequences."""
    return LLM(demo_model.MODEL, enforce_eager=True, **SMALL)


def told(llm: LLM, prompts: list[Any], params: Any, num_top: int = 4) -> tuple[Story, list[Any]]:
    with recorded(llm.engine, num_top) as story:
        outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
    assert not llm.engine.observers
    return story, outputs


def samples(story: Story) -> list[Sample]:
    return [sample for step in story.steps for row in step.rows for sample in row.samples]


def probability(sample: Sample, stage: Stage, token: int) -> float:
    return stage.probabilities[sample.candidates.index(token)]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_probabilities_are_the_engines_logprobs(mode: str) -> None:
    """At the first stage those of the model, at the last one those that the token is drawn from."""
    model = LLM(demo_model.MODEL, max_model_len=128, logprobs_mode=mode)
    params = SamplingParams(
        temperature=1.7, top_k=9, top_p=0.95, min_p=0.001, frequency_penalty=0.4, seed=3
    )
    params = SamplingParams(**{**vars(params), "logprobs": 5, "max_tokens": 12})
    story, [output] = told(model, ["A cache of"], params)
    found = samples(story)
    assert [sample.token_id for sample in found] == output.token_ids
    for sample, logprobs in zip(found, output.outputs[0].logprobs, strict=True):
        stage = sample.stages[0 if mode == "raw_logprobs" else -1]
        for token, entry in logprobs.items():
            if token in sample.candidates and math.isfinite(entry.logprob):
                expected = math.exp(entry.logprob)
                assert probability(sample, stage, token) == pytest.approx(expected, rel=1e-3)
    assert [stage.name for stage in found[0].stages] == [
        *("model", "frequency_penalty", "temperature", "min_p", "top_k", "top_p")
    ]
    assert all(sample.stages[-2].num_left <= 9 for sample in found)
    assert any(sample.stages[-1].num_left > 1 for sample in found)
    model.shutdown()


def test_each_rule_is_told_apart(llm: LLM) -> None:
    """A bias of b multiplies a token's odds by exp(b); what is forbidden has no probability."""
    [plain] = llm.generate(["A cache"], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    likeliest = plain.token_ids[0]
    other = 300 if likeliest != 300 else 301
    params = SamplingParams(
        temperature=0, max_tokens=1, min_tokens=1, logit_bias={other: 3.5}, bad_words=[plain.text]
    )
    story, _ = told(llm, ["A cache"], params, num_top=100)
    [sample] = samples(story)
    model, forbidden, minimum, biased = sample.stages
    assert [s.name for s in sample.stages] == ["model", "bad_words", "min_tokens", "logit_bias"]
    assert max(model.probabilities) == probability(sample, model, likeliest)
    assert probability(sample, forbidden, likeliest) == 0
    assert minimum.num_left < forbidden.num_left < model.num_left == 1024
    if other in sample.candidates:
        before, after = (probability(sample, s, other) for s in (minimum, biased))
        odds = (after / (1 - after)) / (before / (1 - before))
        assert odds == pytest.approx(math.exp(3.5), rel=1e-3)
    assert sample.uniform is None


def test_a_grammar_is_a_rule(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(
        temperature=0, max_tokens=2, structured_outputs={"choice": ["yes", "no"]}
    )
    story, _ = told(llm, ["A cache"], params)
    for sample in samples(story):
        assert sample.stages[1].name == "structured_outputs"
        assert 0 < sample.stages[1].num_left < 10


def test_slots_are_those_of_the_batches(llm: LLM) -> None:
    """And follow from the block tables."""
    found: list[list[int]] = []
    [model] = llm.engine.executor.call_all(lambda runner: runner.network.model)
    hook = model.register_forward_pre_hook(
        lambda _, arguments: found.append(arguments[0].slot_mapping.tolist())
    )
    story, _ = told(llm, [SYSTEM + q for q in QUESTIONS[:3]], SamplingParams(0, max_tokens=8))
    hook.remove()
    assert [[slot for row in step.rows for slot in row.slots] for step in story.steps] == found
    for step in story.steps:
        for row in step.rows:
            for at, slot in enumerate(row.slots, row.start):
                assert slot == row.block_table[at // 16] * 16 + at % 16


def test_chunks_hits_waiting_and_preemption_are_told(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.engine.stats.num_preemptions
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    story, outputs = told(llm, [SYSTEM + q for q in QUESTIONS[:5]], params)
    num_preempted = sum(len(step.preempted) for step in story.steps)
    assert num_preempted == llm.engine.stats.num_preemptions - before > 0
    assert all(
        re.fullmatch(r"#\d needed a block|it needed .*", note.text)
        for step in story.steps
        for note in step.preempted
    )
    rows = [row for step in story.steps for row in step.rows]
    first_hits: dict[int, int] = {}
    for row in rows:
        if row.num_cached_tokens is not None:
            first_hits.setdefault(row.sequence, row.num_cached_tokens)
            hits = row.num_cached_tokens // 16
            assert row.block_table == row.block_table[:hits] + row.new_blocks
    assert [first_hits[n] for n in range(5)] == [output.num_cached_tokens for output in outputs]
    assert any(first_hits.values())
    assert any("a chunk, " in row.why and row.num_tokens < row.num_missing for row in rows)
    reasons = {note.text.partition(" ")[2] for step in story.steps for note in step.waiting}
    assert any("run already, which is max_num_seqs" in reason for reason in reasons)
    assert any("few blocks are free" in reason for reason in reasons)
    for step in story.steps:
        assert sum(row.num_tokens for row in step.rows) <= step.budget
        present = [row.sequence for row in step.rows] + [note.sequence for note in step.waiting]
        assert len(present) == len(set(present))
    for seq, output in zip(story.sequences, outputs, strict=True):
        assert seq.token_ids == output.prompt_token_ids + output.token_ids
        assert seq.finish_reason == output.finish_reason == "length"
        own = [row for row in rows if row.sequence == seq.number]
        assert [token for row in own for token in row.output] == output.token_ids
        for row in own:
            assert row.token_ids == seq.token_ids[row.start : row.start + row.num_tokens]


def test_drafts_are_told() -> None:
    spec = {"method": "draft_model", "model": demo_model.DRAFT_MODEL}
    model = LLM(demo_model.MODEL, max_model_len=128, speculative_config=spec)
    model.engine.scheduler.drafting.controller = fake_controller(lambda most: min(most, 3))
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    story, [output] = told(model, [QUESTIONS[0]], params)
    drafts = [sample for sample in samples(story) if sample.draft_id is not None]
    accepted = [s for s in drafts if s.counts and s.draft_id == s.token_id]
    counts = output.metrics.drafts
    assert len(drafts) == counts.num_draft_tokens > 0
    assert len(accepted) == counts.num_accepted_tokens
    counted = [sample.token_id for sample in samples(story) if sample.counts]
    assert counted == output.token_ids
    model.shutdown()


def test_a_draw_falls_where_the_tokens_probability_is(llm: LLM) -> None:
    """The number that drew it lies in the token's part of the cumulative sum, in token order."""
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True, seed=1)
    story, _ = told(llm, ["A cache"], params, num_top=1024)
    for sample in samples(story):
        weights = torch.zeros(1024, dtype=torch.float64)
        last = torch.tensor(sample.stages[-1].probabilities, dtype=torch.float64)
        weights[torch.tensor(sample.candidates)] = last
        ends = weights.cumsum(0)
        assert sample.uniform is not None
        token = sample.token_id
        assert ends[token] - weights[token] - 1e-5 <= sample.uniform <= ends[token] + 1e-5


def test_spans_join_numbers_that_follow_each_other() -> None:
    assert spans([3, 4, 5, 9, 11, 12]) == "3-5, 9, 11-12"
    assert spans([]) == ""


def test_the_page_holds_the_story_and_asks_for_nothing(llm: LLM) -> None:
    story, _ = told(llm, ["</script><!-- <script>"], SamplingParams(temperature=0, max_tokens=2))
    page = page_of(story)
    [data] = re.findall(r'<script type="application/json" id="story">(.*?)</script>', page, re.S)
    assert json.loads(data)["sequences"][0]["token_ids"] == story.sequences[0].token_ids
    assert len(re.findall(r"</script>", page)) == 2
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://|\bfetch\(|import """, page)
    assert "innerHTML" not in page
    assert "default-src 'none'" in page


FLAGS = [
    "--max-model-len",
    "64",
    "--num-kvcache-blocks",
    "8",
    "--enforce-eager",
    "--max-tokens",
    "2",
]


def test_the_command_shows_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["explain", demo_model.MODEL, *FLAGS, "--temperature", "0"]
    assert cli.main([*command, "What is a cache?"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "step 1: 1 row, 1 of 1024 tokens, 1 of 8 blocks" in out
    assert "the likeliest" in out
    assert "layer by layer" in out
    page = tmp_path / "page.html"
    assert cli.main([*command, "--html", str(page), "What is a cache?"]) == 0
    assert '{"model":"the glossary model that ships with nanovllm",' in page.read_text()
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{page} shows 2 steps" in err
    assert "nanovllm explain" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-top", "0"], "--num-top must be"),
        (["--tensor-parallel-size", "2"], "leave --tensor-parallel-size at 1"),
        (["--html", "/none/a.html"], "cannot be written: name a file in a directory that is there"),
        (["--html", "/tmp"], "is a directory: name a file in it"),
    ],
)
def test_wrong_flags_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert cli.main(["explain", demo_model.MODEL, *FLAGS, *flags, "A"]) == 2
    assert words in capsys.readouterr().err
