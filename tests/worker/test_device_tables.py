"""The device tables and their batches against plain Python loops."""

import random

import pytest
import torch

from nanovllm.core.messages import Admission, NewBlocks, NewTokens, Row, Schedule
from nanovllm.core.worker_info import KVInfo, WindowSpec, WorkerInfo
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.platform.cpu import CPU
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.step_sampler import StepSampler

VOCAB = 1000
PLAIN = SamplingParams()


def make_tables(block_size=4, max_model_len=40, max_num_seqs=6, windows=()):
    info = WorkerInfo(10_000, block_size, max_model_len, VOCAB, 16384, kv=KVInfo(windows))
    return DeviceTables(info, max_num_seqs, CPU(), TORCH)


def admit(table_idx, token_ids, block_ids, params=PLAIN, seed=0):
    stops = frozenset({3})
    return Admission(
        table_idx, table_idx, token_ids, len(token_ids), block_ids, params, seed, stops, ()
    )


def apply(tables, admissions=(), new_blocks=()):
    tables.apply(Schedule(0, list(admissions), list(new_blocks), []))


class Shadow:
    """The expected contents of the tables, in dictionaries by table row."""

    def __init__(self, seed, block_size, max_model_len, max_num_seqs):
        self.chooser = random.Random(seed)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.free_table_indices = list(range(max_num_seqs))
        self.token_ids, self.blocks, self.computed, self.sampling = {}, {}, {}, {}
        self.unused_blocks = self.chooser.sample(range(10_000), 10_000)

    def admit(self):
        """Start a sequence in a free table row, which may have had another sequence before."""
        table_idx = self.free_table_indices.pop(
            self.chooser.randrange(len(self.free_table_indices))
        )
        length = self.chooser.randint(1, self.max_model_len - 1)
        self.token_ids[table_idx] = [self.chooser.randrange(VOCAB) for _ in range(length)]
        self.blocks[table_idx] = []
        self.computed[table_idx] = self.chooser.choice([0, self.chooser.randrange(length)])
        self.grow(table_idx, self.computed[table_idx])
        chooser = self.chooser
        params = SamplingParams(
            temperature=chooser.random(),
            top_k=chooser.choice([0, chooser.randint(1, 2000)]),
            top_p=chooser.choice([1.0, 1 - chooser.random()]),
            min_p=chooser.choice([0.0, chooser.random()]),
            repetition_penalty=chooser.choice([1.0, 2.0]),
        )
        self.sampling[table_idx] = (params, chooser.randrange(2**63))
        return table_idx

    def grow(self, table_idx, num_tokens):
        """Append blocks for `num_tokens` tokens; return the index of the first and the new ids."""
        start = len(self.blocks[table_idx])
        needed = -(-num_tokens // self.block_size) - start
        new = [self.unused_blocks.pop() for _ in range(needed)]
        self.blocks[table_idx] += new
        return start, new

    def step(self, step_id):
        """Return a schedule of admissions, chunks and single tokens; end some sequences first."""
        for table_idx in [s for s in self.token_ids if self.chooser.random() < 0.15]:
            for table in (self.token_ids, self.blocks, self.computed, self.sampling):
                del table[table_idx]
            self.free_table_indices.append(table_idx)
        admitted = []
        while self.free_table_indices and (not self.token_ids or self.chooser.random() < 0.5):
            admitted.append(self.admit())
        rows, new_blocks = [], []
        running = list(self.token_ids)
        self.chooser.shuffle(running)
        for table_idx in running[: self.chooser.randint(1, len(running))]:
            left = len(self.token_ids[table_idx]) - self.computed[table_idx]
            count = self.chooser.choice([left, self.chooser.randint(1, left)])
            start, new = self.grow(table_idx, self.computed[table_idx] + count)
            if new and table_idx not in admitted:
                new_blocks.append(NewBlocks(table_idx, start, new))
            rows.append(
                Row(
                    100 + table_idx,
                    table_idx,
                    self.computed[table_idx],
                    count,
                    samples=count == left,
                )
            )
        admissions = [
            admit(
                table_idx,
                list(self.token_ids[table_idx]),
                list(self.blocks[table_idx]),
                *self.sampling[table_idx],
            )
            for table_idx in admitted
        ]
        return Schedule(step_id, admissions, new_blocks, rows)

    def take(self, rows, sampled):
        """Count the rows' tokens as computed, append the sampled tokens, end full sequences."""
        sampled = iter(sampled)
        for row in rows:
            self.computed[row.table_idx] += row.num_scheduled_tokens
            if row.samples:
                token = next(sampled)
                if len(self.token_ids[row.table_idx]) == self.max_model_len:
                    for table in (self.token_ids, self.blocks, self.computed, self.sampling):
                        del table[row.table_idx]
                    self.free_table_indices.append(row.table_idx)
                else:
                    self.token_ids[row.table_idx].append(token)


def check_batch(batch, rows, shadow):
    """Compare a batch with loops over its rows and their positions."""
    input_ids, positions, slot_mapping, ends = [], [], [], [0]
    for row in rows:
        stop = row.num_computed_tokens + row.num_scheduled_tokens
        for position in range(row.num_computed_tokens, stop):
            input_ids.append(shadow.token_ids[row.table_idx][position])
            positions.append(position)
            block = shadow.blocks[row.table_idx][position // shadow.block_size]
            slot_mapping.append(block * shadow.block_size + position % shadow.block_size)
        ends.append(ends[-1] + row.num_scheduled_tokens)
    seq_lens = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
    assert batch.input_ids.tolist() == input_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slot_mapping
    assert batch.cu_seqlens_q.tolist() == ends
    assert batch.seq_lens.tolist() == seq_lens
    assert batch.lengths.query_lens == tuple(row.num_scheduled_tokens for row in rows)
    assert batch.lengths.seq_lens == tuple(seq_lens)
    for row, table, seq_len in zip(rows, batch.block_tables.tolist(), seq_lens, strict=True):
        needed = -(-seq_len // shadow.block_size)
        assert table[:needed] == shadow.blocks[row.table_idx][:needed]


def sampling_of(rows):
    """Return how to sample `rows`, as the sampler gets it."""
    return rows.parameters()


def check_sampling(tables, sampling, rows, shadow):
    """Compare which logits each sampling row reads, and its sampling parameters."""
    output_indices, wanted = [], []
    end = 0
    for row in rows:
        end += row.num_scheduled_tokens
        if row.samples:
            output_indices.append(end - 1)
            params, seed = shadow.sampling[row.table_idx]
            position = len(shadow.token_ids[row.table_idx])
            wanted.append((params.temperature, seed, position, params.top_p, params.min_p))
            assert tables.params[row.table_idx] == params
            assert (tables.rules[row.table_idx] is not None) == (params.repetition_penalty != 1)
    assert len(sampling) == len(wanted)
    assert sampling.rows == [row for row in rows if row.samples]
    assert sampling.output_indices.tolist() == output_indices
    if not wanted:
        return
    drawn = sampling_of(sampling)
    temperatures, seeds, positions, top_ps, min_ps = zip(*wanted, strict=True)
    assert drawn.temperatures.tolist() == pytest.approx(temperatures)
    assert drawn.seeds.tolist() == list(seeds)
    assert drawn.positions.tolist() == list(positions)
    assert drawn.top_ps.tolist() == pytest.approx(top_ps)
    assert drawn.min_ps.tolist() == pytest.approx(min_ps)
    for row, top_k in zip(sampling.rows, drawn.top_ks.tolist(), strict=True):
        params, _ = shadow.sampling[row.table_idx]
        assert top_k == params.top_k if params.top_k else top_k > VOCAB


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(seed, block_size):
    """Sixty steps with admissions, chunks, decodes and ends; table rows are used again."""
    max_model_len, max_num_seqs = 37, 5
    tables = make_tables(block_size, max_model_len, max_num_seqs)
    shadow = Shadow(seed, block_size, max_model_len, max_num_seqs)
    for step_id in range(60):
        schedule = shadow.step(step_id)
        tables.apply(schedule)
        check_batch(tables.batch(schedule.rows), schedule.rows, shadow)
        sampling = StepSampler(tables, schedule.rows)
        check_sampling(tables, sampling, schedule.rows, shadow)
        sampled = [shadow.chooser.randrange(VOCAB) for row in schedule.rows if row.samples]
        sampling.store(torch.tensor(sampled, dtype=torch.int64))
        shadow.take(schedule.rows, sampled)


def test_window_groups_have_tables_of_their_own():
    """Cells behind a table row's first block table. A batch has the same tokens for each table."""
    tables = make_tables(max_model_len=30, windows=(WindowSpec(5, 2), WindowSpec(9, 1)))
    width = 8
    assert tables.block_tables.shape[1] == width
    first = admit(1, list(range(100, 110)), [7, 3, 5])
    others = [NewBlocks(1, table * width + 1, [10 * table, 10 * table + 1]) for table in (1, 2, 3)]
    apply(tables, [first], others)
    apply(tables, new_blocks=[NewBlocks(1, 3, [9]), NewBlocks(1, 2 * width + 3, [29])])
    rows = [Row(1, 1, 6, 4, samples=True)]
    batch = tables.batch(rows)
    assert batch.block_tables.tolist() == [[7, 3, 5]]
    assert batch.slot_mapping.tolist() == [14, 15, 20, 21]
    assert len(batch.others) == 3
    for table, other in enumerate(batch.others, 1):
        assert other.block_tables.tolist() == [[0, 10 * table, 10 * table + 1]]
        begin = 40 * table
        assert other.slot_mapping.tolist() == [begin + 2, begin + 3, begin + 4, begin + 5]
        assert other.input_ids is batch.input_ids
        assert other.lengths == batch.lengths
        assert other.others == ()
    assert tables.other_tables[1][1].tolist() == [0, 20, 21, 29, 0, 0, 0, 0]
    scratch = [tables.block_tables, *tables.other_tables]
    assert all(table[tables.scratch_idx].tolist() == [10_000] * width for table in scratch)


def test_slots_past_32_bits():
    """Block ids are int32 in the tables, but block id times block size exceeds int32."""
    tables = make_tables(block_size=4096, max_model_len=4096)
    apply(tables, [admit(0, [1, 2], [2**31 - 1])])
    batch = tables.batch([Row(1, 0, 0, 2, samples=True)])
    first = (2**31 - 1) * 4096
    assert batch.slot_mapping.tolist() == [first, first + 1]


def test_the_token_past_a_full_sequence_overwrites_nobody():
    """A sequence of max_model_len tokens samples once more. The next table row stays unchanged."""
    tables = make_tables(max_model_len=4)
    apply(tables, [admit(0, [1, 2, 3, 4], [1]), admit(1, [9], [2])])
    rows = [Row(1, 0, 3, 1, samples=True), Row(2, 1, 0, 1, samples=True)]
    StepSampler(tables, rows).store(torch.tensor([50, 60]))
    batch = tables.batch([Row(1, 0, 0, 4, samples=True), Row(2, 1, 0, 2, samples=True)])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 9, 60]


def test_new_tokens_follow_the_sampled_one():
    tables = make_tables()
    apply(tables, [admit(0, [1, 2], [3])])
    StepSampler(tables, [Row(1, 0, 0, 2, samples=True)]).store(torch.tensor([40]))
    tables.apply(Schedule(1, [], [NewBlocks(0, 1, [8])], [], new_tokens=[NewTokens(0, 3, [7, 9])]))
    batch = tables.batch([Row(1, 0, 2, 3, samples=True)])
    assert batch.input_ids.tolist() == [40, 7, 9]
    assert batch.slot_mapping.tolist() == [14, 15, 32]
