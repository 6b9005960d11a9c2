"""Models of ours beside those of transformers: logits of all positions, and generated tokens."""

import dataclasses
import itertools
import os
import random
from collections import Counter

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.core.messages import Admission, NewBlocks, Row, Schedule
from nanovllm.core.worker_info import KVInfo, WorkerInfo, num_tables, pages_for
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.loading.hub import open_checkpoint
from nanovllm.options.config import Config
from nanovllm.parallel.rank_setup import check_network
from nanovllm.platform.cpu import CPU
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.network import Network
from tests.closeness import assert_close

MAX_LENGTH = 128
NUM_TOKENS = 40
"""Generated behind a prompt."""
NUM_PAGES = 1000
GREEDY = SamplingParams(temperature=0)
FEW = "FAMILY_CASES" not in os.environ
"""Whether only some configurations generate, each with one size of chunks: see `runs`."""


class Steps:
    """Our model from a directory, with a KV cache and device tables, to run hand-made schedules."""

    def __init__(self, path, block_size, dtype="float32"):
        checkpoint = open_checkpoint(str(path))
        config = Config(str(path), device="cpu", kvcache_block_size=block_size, dtype=dtype)
        spec = check_network(config, checkpoint)
        self.network = Network(spec, MAX_LENGTH, CPU())
        self.network.make_pool(NUM_PAGES)
        self.windows = self.network.attention.layout.windows
        self.state_pages = self.network.attention.states.num_pages
        sizes = (NUM_PAGES, block_size, MAX_LENGTH, spec.model_config.vocab_size, 512)
        info = WorkerInfo(*sizes, kv=KVInfo(self.windows, self.state_pages))
        self.tables = DeviceTables(info, 8, CPU(), TORCH)

    @torch.inference_mode()
    def logits(self, schedule):
        """Return the logits of every token of the schedule's rows; check `output_indices` too."""
        self.tables.apply(schedule)
        pool = self.network.pool
        pool.zero(schedule.blocks_to_zero)
        before = pool.pages.clone() if self.state_pages else None
        hidden = self.network.forward(self.tables, schedule.rows, None)
        output_indices = torch.arange(len(hidden)).flip(0)[::3]
        if before is not None:  # a step changes states
            after = pool.pages.clone()
            pool.pages.copy_(before)
        some = self.network.forward(self.tables, schedule.rows, output_indices)
        assert_close(some, hidden[output_indices], rtol=1e-4, atol=1e-4)
        if before is not None:
            assert torch.equal(pool.pages, after)
        return self.network.model.compute_logits(hidden)


def run_in_chunks(path, prompts, cuts, block_size, dtype="float32"):
    """Run the prompts in two mixed steps, before and after each one's cut; return all logits."""
    steps = Steps(path, block_size, dtype)
    chooser = random.Random(block_size)
    blocks = chooser.sample(range(NUM_PAGES), NUM_PAGES)
    width = -(-MAX_LENGTH // block_size)
    table_indices = chooser.sample(range(8), len(prompts))
    admissions, first_blocks, new_blocks, first, second, fresh = [], [], [], [], [], []
    rows = zip(prompts, cuts, table_indices, strict=True)
    for index, (prompt, cut, table_idx) in enumerate(rows):
        before, whole = -(-cut // block_size), -(-len(prompt) // block_size)
        ids = [blocks.pop() for _ in range(whole)]
        for table in range(1, num_tables(steps.windows)):
            pages = [blocks.pop() for _ in range(whole)]
            first_blocks.append(NewBlocks(table_idx, table * width, pages))
        if steps.state_pages:
            pages = [blocks.pop() for _ in range(steps.state_pages)]
            first_blocks.append(NewBlocks(table_idx, num_tables(steps.windows) * width, pages))
            fresh += pages
        start = (index, table_idx, prompt, len(prompt), ids[:before])
        admissions.append(Admission(*start, GREEDY, 0, frozenset(), ()))
        first.append(Row(index, table_idx, 0, cut, samples=cut == len(prompt)))
        if cut < len(prompt):
            second.append(Row(index, table_idx, cut, len(prompt) - cut, samples=True))
            new_blocks.append(NewBlocks(table_idx, before, ids[before:]))
    second.reverse()
    logits = [[] for _ in prompts]
    for schedule in (
        Schedule(0, admissions, first_blocks, first, fresh),
        Schedule(1, [], new_blocks, second),
    ):
        lengths = [row.num_scheduled_tokens for row in schedule.rows]
        parts = steps.logits(schedule).split(lengths)
        for row, part in zip(schedule.rows, parts, strict=True):
            logits[row.seq_id].append(part)
    return [torch.cat(parts) for parts in logits]


def random_prompts(case, vocab_size, lengths):
    chooser = random.Random(case)
    return [[chooser.randrange(vocab_size) for _ in range(length)] for length in lengths]


def vocab_size_of(theirs):
    """Return the vocabulary size of transformers' model, which may be a model for pictures, too."""
    return theirs.config.get_text_config().vocab_size


def assert_logits_agree(theirs, path, case):
    """Compare the logits of all positions. Prompts are whole, or cut inside or between blocks."""
    chooser = random.Random(case)
    block_size = chooser.choice([4, 7, 16])
    lengths = [1, 23, 64, 2 * block_size, 120, 50]
    cuts = [1, 23, chooser.randint(1, 63), block_size, 119, chooser.randint(1, 49)]
    prompts = random_prompts(case, vocab_size_of(theirs), lengths)
    with torch.inference_mode():
        for prompt, logits in zip(
            prompts, run_in_chunks(path, prompts, cuts, block_size), strict=True
        ):
            expected = theirs(torch.tensor([prompt])).logits[0]
            assert_close(logits, expected, of_largest=1e-4, axes=("position", "logit"))


def assert_tokens_are_greedy(theirs, prompts, outputs):
    """Each output has NUM_TOKENS tokens, each the likeliest one after the tokens before it."""
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = theirs(torch.tensor([prompt + output.token_ids])).logits[0]
            assert output.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert len(output.token_ids) == NUM_TOKENS


def runs(cases, chunks=(24, 1), every=1):
    """Return the cases that generate, each with the number of tokens in a step.

    With FAMILY_CASES in the environment these are all cases with all of `chunks`; without it, each
    case whose number is a multiple of `every`, with one of them.
    """
    if not FEW:
        return list(itertools.product(cases, chunks))
    numbers, found = Counter(), []
    for case in list(cases)[::every]:
        family = case.split()[0]
        found.append((case, chunks[numbers[family] % len(chunks)]))
        numbers[family] += 1
    return found


def saved_models(make_model, cases):
    """Return a fixture: each case, the model of transformers, and the directory where it is."""

    @pytest.fixture(scope="module", params=cases)
    def saved(request, tmp_path_factory):
        model, path = make_model(request.param), tmp_path_factory.mktemp("model")
        model.save_pretrained(path)
        return request.param, model, path

    return saved


def test_logits_of_all_positions(saved, caplog):
    """What is for pictures is left out, with a line in the log."""
    case, theirs, path = saved
    with caplog.at_level("INFO", logger="nanovllm.loading.loader"):
        assert_logits_agree(theirs, path, case)
    takes_pictures = theirs.config is not theirs.config.get_text_config()
    assert ("left out, because" in caplog.text) == takes_pictures


def check_answers(saved, chunk, make_llm):
    """Tokens behind each of three prompts: batched, in chunks, preempted, and from a hit."""
    case, theirs, path = saved
    prompts = random_prompts(case, vocab_size_of(theirs), [3, 17, 60])
    options = {"device": "cpu", "max_model_len": MAX_LENGTH, "kvcache_block_size": 16}
    options["max_num_batched_tokens"] = chunk
    llm = make_llm(path, num_kvcache_blocks=200, **options)
    params = dataclasses.replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_tokens_are_greedy(theirs, prompts, outputs)

    longer = prompts[2] + outputs[2].token_ids[:24]
    [hit] = llm.generate([longer], dataclasses.replace(params, max_tokens=16), use_tqdm=False)
    assert hit.token_ids == outputs[2].token_ids[24:40]
    assert hit.num_cached_tokens >= 80

    if chunk == 1:  # a step has one row: nothing is preempted
        return
    smallest = pages_for(MAX_LENGTH, 16, llm.engine.worker_info.kv.windows, chunk)
    llm = make_llm(path, num_kvcache_blocks=smallest + 1, **options)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]
    assert llm.engine.scheduler.stats.num_preemptions
