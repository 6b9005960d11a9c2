"""Masks are functions of the output before their position, whatever was read and drafted before."""

import random
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.core.messages import Admission, FinishInfo, Row, Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.features.structured.grammar_masks import GrammarMasks, GrammarRow, Masks
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.platform.cpu import CPU
from nanovllm.worker.device_tables import DeviceTables
from tests.structured.test_grammar import EOS, TOKENIZER, VOCAB_SIZE

KERNELS = CPU().kernels(torch.float32)

COMPILER = GrammarCompiler(lambda: TOKENIZER, VOCAB_SIZE, EOS)
PROMPT = [5, 6, 7]
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {
        "json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"enum": [1, 2, 12]}},
            "required": ["name", "n"],
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    },
    "choice": {"choice": ["red", "reddish", "green"]},
    "regex": {"regex": "[ab]{2,9}c?"},
    "marks": {"choice": ["a <think> b", "<|im_end|>", "<|im_end|>!"]},
}


def make_row(form: dict[str, Any], output: list[int], stops: frozenset[int]) -> GrammarRow:
    params = SamplingParams(structured_outputs=form)
    new = Admission(0, 0, PROMPT + output, len(PROMPT), [], params, 0, stops, ())
    return GrammarRow(COMPILER, new, forces=True)


def allowed(row: GrammarRow, known: list[int], drafts: list[int]) -> list[set[int]]:
    """Return the tokens that each of the masks allows."""
    masks = torch.full((1 + len(drafts), COMPILER.mask_bytes), 255, dtype=torch.uint8)
    assert row.write_masks(known, drafts, Masks(masks), 0) is None
    return [
        {token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1}
        for mask in masks.tolist()
    ]


@pytest.mark.parametrize("form", GRAMMARS)
@pytest.mark.parametrize("stops", [frozenset(EOS), frozenset({EOS[1], 65}), frozenset()])
def test_masks_and_forced_tokens_depend_on_the_output_alone(
    form: str, stops: frozenset[int]
) -> None:
    """A walk with drafts, right and wrong ones, beside a new row for each mask."""
    rng = random.Random(0)
    for _ in range(3):
        output: list[int] = []
        row = make_row(GRAMMARS[form], [], stops)
        unread: list[int] = []
        for _ in range(12):
            right: list[int] = []
            expected = [allowed(make_row(GRAMMARS[form], output, stops), [], [])[0]]
            while len(right) < rng.randint(0, 4):
                right.append(rng.choice(sorted(expected[-1])))
                fresh = make_row(GRAMMARS[form], output + right, stops)
                expected += allowed(fresh, [], [])
            drafts = right + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 2))]
            found = allowed(row, unread, drafts)
            assert found[: len(expected)] == expected
            unread = [*right, rng.choice(sorted(expected[-1]))]
            output += unread
            if rng.random() < 0.6:
                forced = row.jump_forward(unread)
                assert forced == make_row(GRAMMARS[form], [], stops).jump_forward(list(output))
                for token in forced:  # it is the only one that its mask allows
                    fresh = make_row(GRAMMARS[form], output, stops)
                    assert allowed(fresh, [], []) == [{token}]
                    output.append(token)
                unread = []
            assert row.num_known_tokens == len(PROMPT) + len(output) - len(unread)


def test_masks_behind_a_forbidden_draft_are_left_alone() -> None:
    row = make_row({"regex": "[ab]{8}"}, [], frozenset(EOS))
    (first,) = allowed(row, [], [])
    token = min(first)
    masks = allowed(row, [], [token, 500, token, token])
    assert masks[0] == first
    assert 500 not in masks[1]
    assert all(len(mask) == VOCAB_SIZE for mask in masks[2:])
    assert allowed(row, [token], []) == masks[1:2]


def test_complete_output_has_one_end() -> None:
    """So that it can be forced; while more may follow, each end is allowed."""
    tokens = COMPILER._make_tokenizer()[0].greedy_tokenize("red")
    form = {"choice": ["red", "reddish"]}
    row = make_row(form, tokens, frozenset(EOS))
    assert set(EOS) < allowed(row, [], [])[0]
    for token in COMPILER._make_tokenizer()[0].greedy_tokenize("dish"):
        row.jump_forward([token])
    assert allowed(row, [], []) == [{EOS[0]}]
    stopped = make_row(form, tokens, frozenset({3}))  # ends with its own stop token only
    assert {3, *EOS} < allowed(stopped, [], [])[0]


def test_draft_that_breaks_the_matcher_changes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a wrong draft that meets a limit of llguidance ends the request."""
    row = make_row({"regex": "[ab]{4}"}, [], frozenset(EOS))
    expected = allowed(row, [], [])
    token = min(expected[0])
    with monkeypatch.context() as patch:
        read = GrammarRow._consume

        def consume(self: GrammarRow, matcher: Any, token: int) -> bool:
            matcher.consume_token(1000)  # not allowed: the matcher is broken from now on
            return read(self, matcher, token)

        patch.setattr(GrammarRow, "_consume", consume)
        allowed(row, [], [token])
    assert allowed(row, [token], []) == allowed(
        make_row({"regex": "[ab]{4}"}, [token], frozenset(EOS)), [], []
    )


def test_complete_output_without_an_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind drafts it is only noted when they have been read."""
    monkeypatch.setattr(COMPILER, "eos_token_ids", ())
    tokens = COMPILER._make_tokenizer()[0].greedy_tokenize("ab")
    row = make_row({"regex": "ab"}, [], frozenset())
    masks = torch.zeros((3, COMPILER.mask_bytes), dtype=torch.uint8)
    assert row.write_masks([], tokens, Masks(masks), 0) is None
    assert not masks[2].any()
    assert row.jump_forward(tokens) == []
    assert row.write_masks([], [], Masks(masks), 0) == FinishInfo("stop")


def test_output_that_breaks_its_grammar_is_an_error() -> None:
    row = make_row({"regex": "ab"}, [500], frozenset(EOS))
    masks = torch.zeros((1, COMPILER.mask_bytes), dtype=torch.uint8)
    finish_info = row.write_masks([], [], Masks(masks), 0)
    assert finish_info is not None
    assert finish_info.finish_reason == "error"
    assert "failed after 0 tokens: it does not allow what was generated" in str(
        finish_info.stop_reason
    )


@pytest.mark.parametrize("max_tokens", [16, 2])
def test_a_row_whose_sequence_has_ended_keeps_no_matcher(max_tokens: int) -> None:
    row = make_row({"regex": "[ab]{3}"}, [], frozenset(EOS))
    row._max_tokens = max_tokens
    (a,) = COMPILER._make_tokenizer()[0].greedy_tokenize("a")
    assert row.jump_forward([a]) == []
    assert row._matcher is not None
    assert row.jump_forward([a]) == []
    assert (row._matcher is None) == (max_tokens == 2)
    assert row.jump_forward([a]) == [EOS[0]]
    assert row._matcher is None


def test_a_row_that_no_step_has_keeps_no_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence was aborted, or ended by a stop string: the worker is not told."""
    monkeypatch.setattr("nanovllm.features.structured.grammar_masks._ABSENT_STEPS", 4)
    tables = DeviceTables(WorkerInfo(8, 4, 16, VOCAB_SIZE, 64), 2, CPU(), KERNELS)
    masks = GrammarMasks(COMPILER)
    params = SamplingParams(structured_outputs=GRAMMARS["regex"])
    admissions = [Admission(i, i, PROMPT, 3, [i], params, 0, frozenset(EOS), ()) for i in range(2)]
    tables.apply(Schedule(0, admissions, [], []))
    masks.admit(admissions)
    rows = [Row(i, i, 2, 1, True) for i in range(2)]
    for step in range(10):
        launched = masks.begin(tables, rows if step == 0 else rows[:1])
        assert launched is not None
        launched.apply(torch.zeros(2, VOCAB_SIZE))
    first, second = masks._rows.values()
    assert first._matcher is not None
    assert second._matcher is None


def test_a_limit_forces_no_end() -> None:
    """Symptom: an output whose grammar meets a limit is cut off, and called "stop"."""
    many = {"type": "object", "properties": {f"k{i}": {"const": i} for i in range(700)}}
    schema = {"properties": {"a": {"enum": [1, 2]}, "b": many}, "required": ["a", "b"]}
    form = {"json": {"type": "object", **schema}, "disable_any_whitespace": True}
    row = make_row(form, [], frozenset(EOS))
    tokens = COMPILER._make_tokenizer()[0].greedy_tokenize('{"a":1,"b":{"k0":0}}')
    masks = Masks(torch.zeros((1, COMPILER.mask_bytes), dtype=torch.uint8))
    while (finish_info := row.write_masks([], [], masks, 0)) is None:
        known = row.num_known_tokens - len(PROMPT)
        forced = row.jump_forward(tokens[known : known + 1])
        assert forced == tokens[known + 1 :][: len(forced)]
    assert str(finish_info.stop_reason).startswith(
        "the output cannot be finished: structured_outputs.json '{"
    )


def test_long_forced_text_comes_in_parts() -> None:
    """Each forced token costs as much as the text that is left: one step must not take seconds."""
    text = "word " * 300
    row = make_row({"choice": [text]}, [], frozenset(EOS))
    found = row.jump_forward([])
    assert 0 < len(found) < 20
    while more := row.jump_forward([]):
        found += more
    assert COMPILER._make_tokenizer()[0].decode_str(found[:-1]) == text
    assert found[-1] == EOS[0]


def test_step_masks_logits_of_the_rows_that_have_a_grammar() -> None:
    """Beside a row without one, a row with drafts; computed in the thread or, as on CUDA, after."""
    forms = [GRAMMARS["regex"], None, GRAMMARS["choice"]]
    tables = DeviceTables(WorkerInfo(8, 4, 16, VOCAB_SIZE, 64), 3, CPU(), KERNELS)
    masks = GrammarMasks(COMPILER)
    outputs = ([65], [], [])
    admissions = []
    for i, (form, output) in enumerate(zip(forms, outputs, strict=True)):
        params = SamplingParams(structured_outputs=form)
        known = PROMPT + output
        admissions.append(Admission(i, i, known, 3, [i], params, 0, frozenset(EOS), ()))
    tables.apply(Schedule(0, admissions, [], []))
    masks.admit(admissions)
    tables.token_ids[0, 4:6] = torch.tensor([66, 500])  # drafts, the second wrong
    rows = [Row(0, 0, 3, 3, True, 2), Row(1, 1, 2, 1, True), Row(2, 2, 2, 1, True)]
    step = masks.begin(tables, rows)
    assert step is not None
    expected = torch.zeros(5, VOCAB_SIZE)
    found = [
        *allowed(make_row(GRAMMARS["regex"], [65], frozenset(EOS)), [], [66, 500]),
        set(range(VOCAB_SIZE)),
        *allowed(make_row(GRAMMARS["choice"], [], frozenset(EOS)), [], []),
    ]
    for line, tokens in zip(expected, found, strict=True):
        line[[token for token in range(VOCAB_SIZE) if token not in tokens]] = -torch.inf
    logits = torch.zeros(5, VOCAB_SIZE)
    step.apply(logits)
    assert torch.equal(logits, expected)
    assert (step.finish_infos, list(step.forcing)) == ({}, [0, 2])
    step._written, tables.kernels = None, TORCH  # as on CUDA
    logits = torch.zeros(5, VOCAB_SIZE)
    step.apply(logits)
    assert torch.equal(logits, expected)
    assert masks.begin(tables, rows[1:2]) is None
