"""The number of KV blocks by config and free memory, and the error if it is too small."""

import dataclasses
import errno
import io
import itertools
import os

import psutil
import pytest
import torch

from nanovllm import SamplingParams, demo_model
from nanovllm.core.worker_info import KVInfo, WindowSpec, WorkerInfo
from nanovllm.errors import OutOfMemoryError
from nanovllm.options.config import Config
from nanovllm.platform import cpu
from nanovllm.platform.cpu import CPU, available_memory
from nanovllm.platform.cuda import CUDA
from nanovllm.utils import system
from nanovllm.worker.kv_cache import (
    graph_bytes,
    memory_errors,
    num_blocks_that_fit,
    require_one_sequence,
)

GIB = 2**30


def blocks_on_cpu(block_bytes=1000, max_blocks=10**9, num_reserved=0, **options):
    def warm_up():
        raise AssertionError("the CPU needs no warm-up")

    config = Config("model", **options)
    return num_blocks_that_fit(config, CPU(), block_bytes, max_blocks, warm_up, num_reserved)


@pytest.fixture
def free_memory(monkeypatch):
    """Return a function that sets the machine's available bytes."""
    return lambda size: monkeypatch.setattr(cpu, "available_memory", lambda: size)


def fake_files(monkeypatch, **contents):
    """Let nothing but these files be found, named by the last part of their paths."""

    def fake_open(path, *args, **kwargs):
        name = str(path).rpartition("/")[2].replace(".", "_")
        if name not in contents:
            raise FileNotFoundError(path)
        return io.StringIO(contents[name])

    monkeypatch.setattr(system, "open", fake_open, raising=False)
    monkeypatch.setattr("io.open", fake_open)  # pathlib's


def test_a_given_number_of_blocks_is_taken_as_it_is():
    assert blocks_on_cpu(num_kvcache_blocks=7, block_bytes=10**12, max_blocks=3) == 7


def test_reserved_blocks_come_out_of_the_memory_but_not_out_of_a_given_number():
    assert blocks_on_cpu(kv_cache_memory_bytes=5000, num_reserved=1) == 4
    assert blocks_on_cpu(kv_cache_memory_bytes=5000, num_reserved=1, max_blocks=5) == 4
    assert blocks_on_cpu(kv_cache_memory_bytes=5000, num_reserved=1, max_blocks=3) == 3
    assert blocks_on_cpu(kv_cache_memory_bytes=999, num_reserved=1) == 0
    assert blocks_on_cpu(num_kvcache_blocks=7, num_reserved=1) == 7


def test_cuda_pool_leaves_room_for_graphs(monkeypatch):
    for name, value in {
        "synchronize": None,
        "empty_cache": None,
        "max_memory_allocated": 2000,
        "memory_allocated": 1500,
        "mem_get_info": (20_000, 15_000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    config = Config("model", gpu_memory_utilization=0.8)
    for num_bytes, blocks in ((0, 10), (2500, 7), (20_000, 0)):
        found = num_blocks_that_fit(
            config, CUDA(torch.device("cuda")), 1000, 100, lambda n=num_bytes: n
        )
        assert found == blocks
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6500, 15_000))  # others have it
    assert num_blocks_that_fit(config, CUDA(torch.device("cuda")), 1000, 100, lambda: 0) == 6


@pytest.mark.parametrize(
    ("sizes", "captured", "expected"),
    [
        ([1, 2, 4, 8, 16, 20], [20, 16, 8], 700 + 30 + 30 + 3 * 30),
        ([1, 2, 4], [4, 2, 1], 700 + 30 + 30),
        ([1, 2], [2, 1], 700 + 30),
        ([1], [1], 700),
    ],
)
def test_memory_of_all_graphs_is_seen_on_three(monkeypatch, sizes, captured, expected):
    """The largest allocates the shared memory, 670 bytes here; each graph has 30 bytes more."""
    used = [5000]
    seen = []
    monkeypatch.setattr(CUDA, "used_bytes", lambda self: used[0])

    def capture(size):
        used[0] += 30 if seen else 700
        seen.append(size)

    assert graph_bytes(sizes, capture, CUDA(torch.device("cuda"))) == expected
    assert seen == captured


@pytest.mark.parametrize("grown", [(700, 9000, 30), (700, 30, 9000)])
def test_memory_that_a_neighbour_took_is_counted_once(monkeypatch, grown):
    """Symptom: multiplied by the number of graphs, it leaves no memory for the pool."""
    used = itertools.accumulate((5000, *grown))
    monkeypatch.setattr(CUDA, "used_bytes", lambda self: next(used))
    found = graph_bytes(list(range(60)), lambda size: None, CUDA(torch.device("cuda")))
    assert found == sum(grown) + 57 * 30


def test_cpu_ranks_share_what_is_free(free_memory):
    free_memory(6 * GIB)
    assert blocks_on_cpu(block_bytes=GIB // 4, tensor_parallel_size=2) == 6


def test_blocks_of_window_groups_count():
    """Of 4096 tokens, a window of 32 holds at most 7 blocks in a step of 64 tokens."""
    info = WorkerInfo(256 + 3 * 7, 16, 4096, 1000, 64, kv=KVInfo((WindowSpec(32, 3),)))
    require_one_sequence(info)
    with pytest.raises(OutOfMemoryError, match=r"lower max_model_len to 4080 or less"):
        require_one_sequence(dataclasses.replace(info, num_blocks=info.num_blocks - 1))
    with pytest.raises(OutOfMemoryError, match=r"lower max_model_len to 16 or less"):
        require_one_sequence(dataclasses.replace(info, num_blocks=7))


def test_the_pages_of_a_state_count():
    info = WorkerInfo(4 + 9, 16, 64, 1000, 64, kv=KVInfo(state_pages=9))
    require_one_sequence(info)
    ways_out = r"needs 13, 9 of them for its state; lower max_model_len to 48 or less, or give"
    with pytest.raises(OutOfMemoryError, match=ways_out):
        require_one_sequence(dataclasses.replace(info, num_blocks=12))
    with pytest.raises(OutOfMemoryError, match=r"needs 13, 9 of them for its state; give the pool"):
        require_one_sequence(dataclasses.replace(info, num_blocks=9))


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "needed"), [(4, 65, 5), (0, 1, 1), (3, 4096, 256)]
)
def test_too_few_blocks_name_the_numbers_and_the_ways_out(num_blocks, max_model_len, needed):
    with pytest.raises(OutOfMemoryError) as raised:
        require_one_sequence(WorkerInfo(num_blocks, 16, max_model_len, 1000, 64))
    message = str(raised.value)
    assert f"holds {num_blocks} blocks of 16 tokens" in message
    assert f"max_model_len {max_model_len} needs {needed};" in message
    lower = f"; lower max_model_len to {num_blocks * 16} or less, or give the pool more ("
    assert (lower if num_blocks else "; give the pool more (") in message
    for option in ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_kvcache_blocks"):
        assert option in message


REFUSALS = [
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError("9 bytes"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused_memory_names_the_options_that_size_it(refusal):
    """Symptom: the error is a bare OSError, which no handler of NanoVLLMError gets."""
    config = Config("model", max_num_seqs=7)
    match = "lower one of max_num_seqs 7, "
    with pytest.raises(OutOfMemoryError, match=match) as raised, memory_errors(config):
        raise refusal
    assert str(refusal) in str(raised.value)


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "none"), RuntimeError("shapes differ")])
def test_other_errors_keep_their_class(error):
    with pytest.raises(type(error)) as raised, memory_errors(Config("model")):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("refused_step", [1, 4], ids=["the prompts", "a later one"])
def test_a_step_that_torch_has_no_memory_for_raises_and_the_engine_goes_on(refused_step, make_llm):
    """Symptom: a plain RuntimeError, which no handler of NanoVLLMError gets."""
    questions = [question for question, _ in demo_model.entries()[:3]]
    params = SamplingParams(temperature=0, max_tokens=6)
    llm = make_llm(demo_model.MODEL, device="cpu", enforce_eager=True)
    expected = [output.text for output in llm.generate(questions, params, use_tqdm=False)]
    llm.reset_prefix_cache()
    num_steps = itertools.count(1)

    def ask_for_too_much(*_):
        if next(num_steps) == refused_step:
            torch.empty(2**60, dtype=torch.uint8)

    layer = llm.engine.executor._runner.network.model.model.layers[-1]
    layer.register_forward_pre_hook(ask_for_too_much)
    match = "DefaultCPUAllocator.*: free memory, or lower max_num_batched_tokens"
    with pytest.raises(OutOfMemoryError, match=match) as raised:
        llm.generate(questions, params, use_tqdm=False)
    assert isinstance(raised.value.__cause__, RuntimeError)
    texts = [output.text for output in llm.generate(questions, params, use_tqdm=False)]
    assert texts == expected


@pytest.mark.parametrize(
    ("limit", "usage"),
    [("memory_max", "memory_current"), ("memory_limit_in_bytes", "memory_usage_in_bytes")],
)
def test_a_container_with_less_than_the_machine(monkeypatch, limit, usage):
    files = {"meminfo": "MemAvailable: 500 kB\n", limit: "300000\n", usage: "200000\n"}
    fake_files(monkeypatch, **files)
    assert available_memory() == 100_000


def test_a_containers_page_cache_counts_as_available(monkeypatch):
    """The kernel can reclaim it, so reading the weights must not make the pool smaller."""
    files = {"memory_max": "300000\n", "memory_current": "200000\n"}
    stat = "anon 50000\nfile 150000\ninactive_file 120000\nactive_file 30000\n"
    fake_files(monkeypatch, meminfo="MemAvailable: 500 kB\n", memory_stat=stat, **files)
    assert available_memory() >= 220_000


def test_without_proc_half_of_the_physical_memory(monkeypatch):
    fake_files(monkeypatch)
    assert 0 < available_memory() <= psutil.virtual_memory().total


def test_a_share_of_the_machines_memory_bounds_the_pool_on_a_cpu(free_memory, monkeypatch):
    free_memory(100 * GIB)
    monkeypatch.setattr(cpu, "memory_limit", lambda: 10 * GIB)
    monkeypatch.setattr(cpu, "resident_memory", lambda: 2 * GIB)
    assert blocks_on_cpu(block_bytes=GIB) == 4
    assert blocks_on_cpu(block_bytes=GIB, gpu_memory_utilization=0.5) == 3
    assert blocks_on_cpu(block_bytes=GIB, gpu_memory_utilization=0.1) == 0
    assert blocks_on_cpu(block_bytes=GIB, tensor_parallel_size=2, gpu_memory_utilization=0.8) == 2


def test_the_machines_memory_is_that_of_the_cgroup_if_it_has_less(monkeypatch):
    fake_files(monkeypatch, memory_max="300000\n", statm="900 7 1 1 0 1 0\n")
    assert cpu.memory_limit() == 300_000
    assert cpu.resident_memory() == 7 * os.sysconf("SC_PAGE_SIZE")
    fake_files(monkeypatch, memory_max="max\n")
    assert cpu.memory_limit() >= psutil.virtual_memory().total
    assert cpu.resident_memory() == 0
