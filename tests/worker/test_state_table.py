"""A step's cells hold the tokens of prompts, counted from position 0. With kernels whose results
depend on where cells begin, requests still get the same bits in every batch.
"""

import random
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.core.messages import Admission, Row, Schedule
from nanovllm.core.worker_info import DraftInfo, KVInfo, WorkerInfo
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.selector import select_kernels
from nanovllm.kernels.states import StateRows
from nanovllm.kernels.torch_states import read_parts, write_parts
from nanovllm.worker import network
from nanovllm.worker.state_table import StateTable
from tests.checkpoints import make_checkpoint

CPU = torch.device("cpu")
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


def make_table(num_rows: int, **options: int) -> StateTable:
    parts: Any = {"kv": KVInfo(state_pages=2, **options), "drafts": DraftInfo(3)}
    info = WorkerInfo(9, 16, 500, 100, 1000, **parts)
    return StateTable(torch.zeros(num_rows, 2, dtype=torch.int32), info)


def admission(table_idx: int, num_prompt_tokens: int) -> Admission:
    tokens = [0] * num_prompt_tokens
    sizes = table_idx, table_idx, tokens, num_prompt_tokens
    return Admission(*sizes, [], SamplingParams(), 0, frozenset(), ())


def rows_of(table: StateTable, schedule: Schedule) -> StateRows:
    table.begin(schedule)
    lens = torch.tensor([row.num_scheduled_tokens for row in schedule.rows])
    ends = torch.tensor([0, *lens]).cumsum(0)
    indices = torch.tensor([row.table_idx for row in schedule.rows])
    return table.rows(schedule.rows, indices, lens, ends)


def test_cells_are_tokens_of_prompts() -> None:
    """A row goes on behind its prompt, one computes tokens again, and one only measures."""
    table = make_table(6, chunk_size=64)
    admissions = [admission(i, n) for i, n in enumerate((130, 30, 64, 300, 5))]
    drafted = [Row(1, 1, 29, 4, True, 3)]
    rows_of(table, Schedule(0, admissions, [], drafted))
    rows = [
        Row(0, 0, 64, 70, True),
        Row(1, 1, 32, 1, True),  # two of the drafts were right
        Row(2, 2, 64, 1, True),
        Row(3, 3, 128, 64, False),
        Row(4, 4, 1, 4, True),
        Row(5, 5, 0, 65, False),
    ]
    found = rows_of(table, Schedule(1, [], [], rows))
    assert found.cells is not None
    assert found.cu_seqlens.tolist() == [0, 70, 73, 74, 138, 142, 207]
    assert found.cells.spans.tolist() == [[0, 64], [64, 2], [74, 64], [142, 64], [206, 1]]
    assert found.cells.ends.tolist() == [0, 2, 2, 2, 3, 3, 5]
    assert found.cells.begins.tolist() == [66, 70, 73, 138, 138, 207]
    assert found.cells.num_tokens == 195
    assert found.cells.begins.dtype == found.cells.spans.dtype == torch.int32


def test_steps_without_prompts_have_no_cells() -> None:
    rows = [Row(0, 0, 64, 1, True)]
    assert (
        rows_of(make_table(1, chunk_size=64), Schedule(0, [admission(0, 64)], [], rows)).cells
        is None
    )
    rows = [Row(0, 0, 0, 64, True)]
    assert rows_of(make_table(1), Schedule(0, [admission(0, 64)], [], rows)).cells is None


class Coarse(CKernels):
    """Rounds a state where a cell begins. So bits show which tokens were in which cell."""

    computes_cells = True

    def gated_delta(self, qkv, a, b, a_log, dt_bias, states, rows, bound=None):
        call, out, cells = CKernels.gated_delta, [], rows.cells
        for row, pages in enumerate(rows.pages.split(1)):
            start, end = rows.cu_seqlens[row : row + 2].tolist()
            left, spans = int(rows.write_lens[row]), []
            if cells is not None:
                spans = cells.spans[cells.ends[row] : cells.ends[row + 1]].tolist()
                assert sum(count for _, count in spans) <= left
            for begin, count in [*spans, [None, 0]]:
                assert begin in (None, start)
                count = end - start if begin is None else count
                written = left if begin is None else count
                part = StateRows(
                    pages, torch.tensor([0, count]).int(), torch.tensor([written]).int()
                )
                if begin is not None:
                    matrices = read_parts(states, part, 1, a.shape[1])
                    write_parts(states, part, 1, matrices.bfloat16().float())
                tokens = [x[start : start + count] for x in (qkv, a, b)]
                if count:
                    out.append(call(*tokens, a_log, dt_bias, states, part))
                start, left = start + count, left - count
            assert start == end
        return torch.cat(out)


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(103), k=length)


PROMPTS = [random_prompt(0, 200), random_prompt(1, 70), random_prompt(2, 64), random_prompt(3, 333)]
PROMPTS.append(PROMPTS[3][:300] + random_prompt(4, 100))  # shares four cells and more


def results(path, prompts, **options):
    """Return each request's tokens and log-probability, and how many tokens it found cached."""
    sizes = {"max_model_len": 512, "enforce_eager": True, "kvcache_block_size": 32}
    llm = LLM(path, **{**sizes, "num_kvcache_blocks": 400, **options})
    try:
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=0)
        outputs = [out for turn in prompts for out in llm.generate(turn, params, use_tqdm=False)]
        found = [(out.token_ids, out.outputs[0].cumulative_logprob) for out in outputs]
        return found, [out.num_cached_tokens for out in outputs]
    finally:
        llm.shutdown()


def test_bits_do_not_depend_on_where_steps_cut_prompts(tmp_path, monkeypatch, preempted):
    """In steps with room for one cell; preempted; behind hits, which begin where a cell does."""
    path = make_checkpoint(tmp_path, **QWEN3_5)
    if not isinstance(select_kernels(CPU, torch.bfloat16), CKernels):
        pytest.skip("needs a C compiler")
    plain, _ = results(path, [[p] for p in PROMPTS], enable_prefix_caching=False)
    monkeypatch.setattr(network, "select_kernels", lambda *_, **__: Coarse())
    alone, _ = results(path, [[p] for p in PROMPTS], enable_prefix_caching=False)
    assert all(plain[i] != alone[i] for i in (0, 3, 4))  # so the test can fail
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 66}
    found, _ = results(path, [PROMPTS], **small, enable_prefix_caching=False)
    assert found == alone
    found, _ = results(path, [PROMPTS], **small, num_kvcache_blocks=22)
    assert preempted
    assert found == alone
    found, hits = results(path, [PROMPTS, PROMPTS], **small)
    assert found == alone * 2
    assert hits[-5:] == [192, 64, 0, 320, 384]
