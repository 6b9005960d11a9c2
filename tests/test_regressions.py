"""What broke in nano-vllm and its relatives: each is a test, named for what holds here.

Some are tested elsewhere: a directory without safetensors and lists of unequal length in
test_bad_input.py, a slow worker and a port that is taken in test_tensor_parallel.py, more ranks
than KV heads in test_invariance.py, `del llm` and a failed generate in engine/test_llm_engine.py,
prefix hits before the KV is written in scheduler/test_scheduler.py.
"""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import InvalidRequestError, UnsupportedModelError
from nanovllm.factory import make_engine
from nanovllm.loading.hub import open_checkpoint
from nanovllm.options.config import Config
from nanovllm.parallel.pipes import PipeRanks
from nanovllm.parallel.rank_executor import RankExecutor
from nanovllm.parallel.rank_setup import check_networks
from nanovllm.testing.invariants import check_scheduler
from tests.checkpoints import copy_checkpoint
from tests.forked_ranks import forked_ranks
from tests.helpers import environment, token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return token_ids(llm.generate(prompts, params, use_tqdm=False))


def test_greedy_is_accepted_and_repeats_itself(make_llm: Any, random_model: str) -> None:
    llm = make_llm(random_model)
    assert tokens(llm, [[1, 2]]) == tokens(llm, [[1, 2]])


def test_sequences_that_outgrow_the_pool_reach_max_model_len(
    make_llm: Any, random_model: str
) -> None:
    """The pool holds exactly one sequence of max_model_len; three grow to that length in it."""
    llm = make_llm(random_model, kvcache_block_size=4, num_kvcache_blocks=16, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    outputs = llm.generate([[1], [2], [3]], params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [63] * 3
    assert [output.finish_reason for output in outputs] == ["length"] * 3


def test_max_model_len_is_enforced(make_llm: Any, random_model: str) -> None:
    llm = make_llm(random_model, max_model_len=20)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    (output,) = llm.generate([[1] * 19], params, use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    (output,) = llm.generate([[1] * 5], params, use_tqdm=False)
    assert len(output.token_ids) == 15
    with pytest.raises(InvalidRequestError, match="20 tokens"):
        llm.generate([[1] * 20], params, use_tqdm=False)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_below_one_is_refused(max_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens)


def test_empty_prompt_is_refused(make_llm: Any, random_model: str) -> None:
    llm = make_llm(random_model)
    with pytest.raises(InvalidRequestError, match="prompt 1: the prompt is empty"):
        llm.generate([[1], []], GREEDY, use_tqdm=False)
    assert llm.engine.is_finished()


def test_max_num_seqs_counts_half_prefilled_sequences(random_model: str) -> None:
    config = Config(model=random_model, max_num_seqs=2, max_num_batched_tokens=3)
    engine = make_engine(config)
    for i in range(5):
        engine.add_request([i + 1] * 20, GREEDY)
    while not engine.is_finished():
        engine.step()
        holders = [seq for seq in engine.scheduler._sequences.values() if seq.kv.block_table]
        assert len(holders) <= 2


def test_fully_cached_prompt_of_whole_blocks_gives_the_same_tokens(
    make_llm: Any, random_model: str
) -> None:
    """One token of the prompt is computed again: its hidden state gives the first output token."""
    llm = make_llm(random_model, kvcache_block_size=4)
    prompt = list(range(1, 13))
    assert tokens(llm, [prompt]) == tokens(llm, [prompt])


def test_identical_prompts_in_one_step_give_the_same_tokens(
    make_llm: Any, random_model: str
) -> None:
    llm = make_llm(random_model, kvcache_block_size=4)
    prompt = list(range(1, 20))
    (alone,) = tokens(make_llm(random_model, enable_prefix_caching=False), [prompt])
    assert tokens(llm, [prompt, prompt, prompt]) == [alone] * 3
    assert tokens(llm, [prompt, prompt]) == [alone] * 2
    check_scheduler(llm.engine.scheduler)


def test_every_eos_id_stops(make_llm: Any, random_model: str) -> None:
    """generation_config.json names 7 and 11."""
    llm = make_llm(random_model)
    params = [SamplingParams(max_tokens=100, seed=seed) for seed in range(300)]
    outputs = llm.generate([[i] for i in range(20, 320)], params, use_tqdm=False)
    last = {output.token_ids[-1] for output in outputs if output.finish_reason == "stop"}
    assert last == {7, 11}


def test_rope_scaling_is_applied_or_refused(
    make_llm: Any, random_model: str, tmp_path: Path
) -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    prompt = list(range(100, 200))
    plain = tokens(make_llm(random_model), [prompt])
    model = copy_checkpoint(random_model, tmp_path / "yarn", rope_parameters=yarn)
    assert tokens(make_llm(model), [prompt]) != plain
    model = copy_checkpoint(
        random_model, tmp_path / "other", rope_parameters={**yarn, "rope_type": "dynamic"}
    )
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        make_llm(model)


# Several ranks.


def test_schedule_may_exceed_a_mebibyte(random_model: str, tmp_path: Path) -> None:
    """nano-vllm sends schedules through a mebibyte of shared memory."""
    model = copy_checkpoint(random_model, tmp_path, max_position_embeddings=500_000)
    options: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
    }
    expected = tokens(LLM(random_model), [[1, 2, 3]])
    config = Config(model=model, tensor_parallel_size=2, max_model_len=450_000, **options)
    with forked_ranks():
        engine = make_engine(config)
    request = engine.add_request([700] * 400_000, GREEDY)
    sizes = []
    execute = engine.executor.execute

    def measured(schedule: Any) -> Any:
        sizes.append(len(pickle.dumps(schedule)))
        return execute(schedule)

    engine.executor.execute = measured  # type: ignore[method-assign]
    engine.step()
    assert sizes[0] > 2**20
    engine.abort(request)
    engine.add_request([1, 2, 3], GREEDY)
    outputs = []
    while not engine.is_finished():
        outputs += engine.step()
    engine.shutdown()
    assert token_ids(outputs) == expected


def test_ranks_agree_on_the_smallest_block_count(
    random_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(model=random_model, tensor_parallel_size=2, num_kvcache_blocks=90)
    executor = RankExecutor(PipeRanks(*check_networks(config, open_checkpoint(random_model))))
    receive = executor._receive
    measured = {}

    def rank_1_has_less(rank: int) -> Any:
        info = receive(rank)
        if rank in measured:  # the second message of a rank: what it allocated
            assert info.num_blocks == 40
            return info
        measured[rank] = info
        return dataclasses.replace(info, num_blocks=40) if rank == 1 else info

    monkeypatch.setattr(executor, "_receive", rank_1_has_less)
    with forked_ranks():
        info = executor.start()
    for _ in range(2):  # may be called twice
        executor.shutdown()
    assert info.num_blocks == 40
    assert measured[0].num_blocks == 90


def test_spawned_ranks_use_the_configured_block_size(
    make_llm: Any, tensor_parallel_llm: Any, random_model: str
) -> None:
    """nano-vllm sets the block size on a class, and a spawned process has the default again."""
    prompts = [[i + 1] * (10 + i) for i in range(4)]
    alone = make_llm(random_model)
    llm = tensor_parallel_llm(random_model, 2)
    assert llm.engine.worker_info.block_size == 4 != alone.engine.worker_info.block_size
    assert tokens(llm, prompts) == tokens(alone, prompts)


def test_preemption_under_tensor_parallelism_keeps_the_tokens(
    make_llm: Any,
    tensor_parallel_llm: Any,
    random_model: str,
    preempted: list[tuple[int, int]],
) -> None:
    prompts = [[i + 1] * 9 for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = tokens(make_llm(random_model), prompts, params)
    assert not preempted
    assert tokens(tensor_parallel_llm(random_model, 2), prompts, params) == expected
    assert preempted


@pytest.mark.parametrize("size", [1, 2])
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
