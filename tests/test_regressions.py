"""What broke in nano-vllm and its relatives: each is a test, named for what holds here.

Most are tested elsewhere. test_bad_input.py: empty prompts, prompts beyond max_model_len, lists of
unequal length. loading/test_loader.py: a directory without safetensors. test_sampling_params.py:
max_tokens below one. test_finish_reasons.py: several EOS ids, max_model_len. test_invariance.py:
greedy, identical prompts in one step, prompts cached to their last block, more ranks than KV heads,
preemption under tensor parallelism.
models/test_decoder.py, test_model_config.py: rope scaling.
test_tensor_parallel.py: a slow worker, a port that is taken. engine/test_llm_engine.py: `del llm`,
a failed generate. scheduler/test_scheduler.py: prefix hits before the KV is written.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.factory import make_engine
from nanovllm.loading.hub import open_checkpoint
from nanovllm.options.config import Config
from nanovllm.parallel.pipes import PipeRanks
from nanovllm.parallel.rank_executor import RankExecutor
from nanovllm.parallel.rank_setup import check_networks
from nanovllm.worker.model_runner import ModelRunner
from tests.forked_ranks import forked_ranks
from tests.helpers import environment

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_sequences_that_outgrow_the_pool_reach_max_model_len(
    make_llm: Any, random_model: str
) -> None:
    """The pool holds exactly one sequence of max_model_len; three grow to that length in it."""
    llm = make_llm(random_model, kvcache_block_size=4, num_kvcache_blocks=16, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    outputs = llm.generate([[1], [2], [3]], params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [63] * 3
    assert [output.finish_reason for output in outputs] == ["length"] * 3


def test_max_num_seqs_counts_half_prefilled_sequences(random_model: str) -> None:
    config = Config(model=random_model, max_num_seqs=2, max_num_batched_tokens=3)
    engine = make_engine(config)
    for i in range(5):
        engine.add_request([i + 1] * 20, GREEDY)
    while not engine.is_finished():
        engine.step()
        holders = [seq for seq in engine.scheduler._sequences.values() if seq.kv.block_table]
        assert len(holders) <= 2


# Several ranks.


def size_of(runner: ModelRunner, message: bytes) -> int:
    return len(message)


def test_ranks_agree_on_the_smallest_block_count(
    random_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(model=random_model, tensor_parallel_size=2, num_kvcache_blocks=90)
    executor = RankExecutor(PipeRanks(*check_networks(config, open_checkpoint(random_model))))
    receive = executor._receive
    measured = {}

    def rank_1_has_less(rank: int) -> Any:
        info = receive(rank)
        if not isinstance(info, WorkerInfo):
            return info
        if rank in measured:  # the second message of a rank: what it allocated
            assert info.num_blocks == 40
            return info
        measured[rank] = info
        return dataclasses.replace(info, num_blocks=40) if rank == 1 else info

    monkeypatch.setattr(executor, "_receive", rank_1_has_less)
    with forked_ranks():
        info = executor.start()
    # nano-vllm sends schedules through a mebibyte of shared memory.
    assert executor.call_all(size_of, bytes(2**21)) == [2**21] * 2
    for _ in range(2):  # may be called twice
        executor.shutdown()
    assert info.num_blocks == 40
    assert measured[0].num_blocks == 90


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_process_exits_cleanly_with_or_without_shutdown(
    random_model: str, tmp_path: Path, size: int
) -> None:
    """One engine is shut down twice, the next one by Python's exit: no error, no message."""
    shut_down = "llm.shutdown(); llm.shutdown(); llm = make()" if size == 1 else "pass"
    path = tmp_path / "run.py"
    path.write_text(
        f"""
if __name__ == "__main__":
    from nanovllm import LLM, SamplingParams
    def make():
        llm = LLM({random_model!r}, tensor_parallel_size={size}, max_model_len=256)
        llm.generate([[1]], SamplingParams(max_tokens=2), use_tqdm=False)
        return llm
    llm = make()
    {shut_down}
"""
    )
    # Two ranks run on the CPU: there may be fewer GPUs than ranks.
    env = environment(CUDA_VISIBLE_DEVICES="") if size > 1 else environment()
    done = subprocess.run([sys.executable, path], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert b"Error" not in done.stderr
    assert b"Exception" not in done.stderr
