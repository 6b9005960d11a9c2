"""The first and last kernel of a decode step return the same numbers as plain torch. Without a GPU
they are interpreted. They also compile for GPUs that this machine does not have.
"""

import random

import pytest
import torch

from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.triton import TritonBackend
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.features.graphs.cuda_graph import GraphRunner, graph_sizes
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.kernels.triton import decode_step
from nanovllm.kernels.triton.kernels import TritonKernels
from nanovllm.platform.cpu import CPU
from nanovllm.worker.device_tables import DeviceTables
from tests.kernels.triton.harness import compile_launches, count_variants
from tests.kernels.triton.inputs import DEVICE
from tests.kernels.triton.test_compile import assert_fits, meta


def make_tables(width, num_table_rows=9, max_model_len=70, seed=0):
    """Return adjacent tokens and block tables, as the device tables have them, and five columns."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(
        2**31 - 1, (num_table_rows, max_model_len + 1 + width), generator=generator
    )
    table = table.int().to(DEVICE)
    floats = [torch.rand(num_table_rows, generator=generator).to(DEVICE) for _ in range(3)]
    ints = [
        torch.randint(2**62, (num_table_rows,), generator=generator).to(DEVICE) for _ in range(2)
    ]
    columns = (floats[0], ints[0], ints[1], floats[1], floats[2])
    offsets = table[:, -1] % 7 - 3
    return table[:, : max_model_len + 1], table[:, max_model_len + 1 :], offsets, columns


@pytest.mark.parametrize(
    ("block_size", "rows", "shift"), [(1, 1, 0), (5, 9, 1), (16, 3, 0), (256, 9, 1)]
)
def test_gather(rows, block_size, shift):
    """Block ids have up to 31 bits, so block id times block size needs int64. A draft head reads
    the tokens shifted by one position.
    """
    token_ids, block_tables, offsets, columns = make_tables(width=-(-70 // block_size))
    token_ids = token_ids[:, shift:]
    table_indices = torch.randperm(9)[:rows].to(DEVICE)
    positions = torch.randint(70, (rows,)).to(DEVICE)
    offsets = offsets.repeat(2, 1).T[:, 0]  # a column
    args = (token_ids, block_tables, block_size, table_indices, positions, offsets, columns)
    found, expected = decode_step.gather(*args), TORCH.gather(*args)
    for ours, reference in zip(found, expected, strict=True):
        for x, y in zip(ours, reference, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


@pytest.mark.parametrize("rows", [1, 8, 200])
def test_advance(rows):
    """Only the given cells change; a row with move 0 keeps its position. A row without a token (-1)
    reads token 0 in the next step, which may be launched before the host knows. The tokens' places
    go round in the buffer.
    """
    token_ids, _, _, _ = make_tables(width=4, num_table_rows=201)
    table_indices = torch.randperm(200)[:rows].to(DEVICE)
    positions = torch.randint(70, (rows,)).to(DEVICE)
    moves = torch.randint(2, (rows,)).to(DEVICE)
    tokens = torch.randint(1000, (rows,)).to(DEVICE)
    tokens[0] = -1
    lap, stride = rows % 3, rows + 2
    buffer = torch.full((3, stride), 5).to(DEVICE)
    expected = buffer.clone()
    expected[lap, :rows] = tokens
    places = torch.arange(rows).to(DEVICE) + lap * stride
    table = token_ids.clone()
    table[table_indices, positions + 1] = tokens.clamp(min=0).int()
    moved = positions + moves
    following = torch.arange(rows).to(DEVICE) + (lap + 1) % 3 * stride
    rows_of = (table_indices, positions, moves, places, tokens)
    decode_step.advance(token_ids, *rows_of, buffer.view(-1), stride)
    assert torch.equal(token_ids, table)
    assert torch.equal(buffer, expected)
    assert torch.equal(positions, moved)
    assert torch.equal(places, following)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA GPU")
def test_advance_writes_to_pinned_memory_of_the_host():
    token_ids, _, _, _ = make_tables(width=4)
    indices = torch.arange(5, device=DEVICE)
    out = torch.zeros(10, dtype=torch.int64, pin_memory=True)
    zeros = torch.zeros(3, 5, dtype=torch.int64, device=DEVICE)
    decode_step.advance(token_ids, indices, *zeros[:2], indices + 5, indices + 7, out, 0)
    torch.cuda.synchronize()
    assert out.tolist() == [0] * 5 + [7, 8, 9, 10, 11]


@pytest.mark.parametrize("rows", [1, 2])
def test_torch_refuses_to_write_to_the_host(rows):
    """A single number it would copy, which waits for the GPU, so whoever asks must not get it."""
    numbers = torch.zeros(6, rows, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="torch on meta does not write to cpu"):
        TORCH.advance(numbers.int(), *numbers[:5], torch.zeros(9, dtype=torch.int64), 1)


def make_samples(seed, num_rows, max_drafts):
    """Return samples of rows with 0 to `max_drafts` drafts, and the last position of each row."""
    rng = random.Random(seed)
    indices = rng.sample(range(2 * num_rows), num_rows)
    columns, expected = [[], [], [], []], [-5] * (2 * num_rows + 1)
    for table_idx in indices:
        start, count = rng.randrange(50), rng.randint(0, max_drafts)
        inputs = [rng.randrange(3) for _ in range(count + 1)]
        drafts = inputs[1:]
        tokens = [rng.choice([draft, draft, draft, rng.randint(-1, 2)]) for draft in drafts]
        tokens.append(rng.randint(-1, 2))
        num_tokens = 0
        for token, draft in zip(tokens, [*drafts, None], strict=True):
            num_tokens += token >= 0 or num_tokens == 0
            if token != draft:
                break
        expected[table_idx] = start + num_tokens
        following = range(start + 1, start + count + 2)
        found = ([table_idx] * (count + 1), following, inputs, tokens)
        for column, values in zip(columns, found, strict=True):
            column += values
    return [torch.tensor(column, device=DEVICE) for column in columns], expected


@pytest.mark.parametrize(("num_rows", "max_drafts"), [(1, 0), (1, 9), (7, 1), (40, 4), (70, 24)])
@pytest.mark.parametrize("kernels", [TORCH, TritonKernels()])
@pytest.mark.parametrize("seed", range(2))
def test_accept(num_rows, max_drafts, kernels, seed):
    """The last position of a row is that of the token behind its right drafts. A token that could
    not be drawn (-1) ends its row; the first one counts, because its sequence ends anyway.
    """
    (table_indices, following, inputs, tokens), expected = make_samples(seed, num_rows, max_drafts)
    last_positions = torch.full((2 * num_rows + 1,), -5, device=DEVICE)
    kernels.accept(last_positions, table_indices, following, inputs, tokens)
    assert last_positions.tolist()[:-1] == expected[:-1]  # the last one is scratch


def test_compiles_without_spills():
    rows = 1
    table = meta(513, 4097 + 256, dtype=torch.int32)
    token_ids, block_tables = table[:, :4097], table[:, 4097:]
    floats, ints = meta(513, dtype=torch.float32), meta(513)
    columns = (floats, ints, ints, floats, floats)
    args = (token_ids, block_tables, 16, meta(rows), meta(rows), table[:, -1], columns)
    compiled = compile_launches(
        (decode_step.gather, *args),
        (decode_step.advance, token_ids, *[meta(rows)] * 5, meta(3 * rows), rows),
        (decode_step.accept, meta(513), *[meta(rows)] * 4),
    )
    assert_fits(compiled, "_gather", "_advance", "_accept")


def capture_steps(max_tokens):
    """Run what the graphs of up to `max_tokens` tokens capture, but for the layers of the model."""
    cpu = torch.device("cpu")
    spec = AttentionSpec(16, 8, 128, torch.bfloat16, cpu, block_size=64)
    info = WorkerInfo(1000, 64, 4096, 151936, 4096)

    def compute_logits(batch):
        return torch.empty(len(batch.input_ids), info.vocab_size, dtype=torch.bfloat16)

    def capture(step):
        return None, step()

    tables = DeviceTables(info, max_tokens, CPU(), TritonKernels())
    runner = GraphRunner(compute_logits, TritonBackend(spec), tables, max_tokens, capture)
    runner.capture(graph_sizes(max_tokens))


def test_all_graphs_share_the_compiled_kernels():
    """Symptom: a kernel is compiled again for sizes of 1 and multiples of 16, for other blocks, and
    where columns of an odd number of rows are not aligned: 11 times `_advance`, at each start.
    """
    variants = count_variants(capture_steps, 509)
    assert {"_gather", "_advance", "_reduce_blocks", "_weigh_chunks", "_choose"} <= set(variants)
    assert set(variants.values()) == {1}, variants


def gather_both():
    token_ids, block_tables, offsets, columns = make_tables(width=8)
    index = torch.arange(9)
    for tokens in (token_ids, token_ids[:, 1:]):
        decode_step.gather(tokens, block_tables, 16, index, index, offsets, columns)


def test_a_shifted_table_shares_the_compiled_kernel():
    """A draft head reads the tokens of the next positions, which are not aligned."""
    assert count_variants(gather_both) == {"_gather": 1}
