"""Lesson 8: when the blocks run out, one sequence gives up its own, and goes on later."""

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.scheduler.scheduler import Scheduler

NUM_BLOCKS = 6
PROMPTS = {"A": (7, 8), "B": (6, 8)}
"""Tokens of each prompt, and tokens to generate: 15 + 14 tokens want 8 blocks of 4."""


def run() -> list[tuple[dict[str, str], list[str]]]:
    """Return for each step what it does to each sequence, and the owners of the blocks."""
    pool = BlockManager(NUM_BLOCKS, block_size=4)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32)
    sequences = {}
    for number, (name, (num_prompt, num_output)) in enumerate(PROMPTS.items()):
        token_ids = [100 * number + i for i in range(num_prompt)]
        sequences[name] = Sequence(number, token_ids, SamplingParams(max_tokens=num_output))
        scheduler.add(sequences[name])
    names = list(PROMPTS)
    steps: list[tuple[dict[str, str], list[str]]] = []
    while True:
        held = {name for name, seq in sequences.items() if seq.table_idx is not None}
        schedule = scheduler.schedule()
        if schedule is None:
            return steps
        does = {name: "" if seq.is_finished else "waits" for name, seq in sequences.items()}
        for name in held:
            if sequences[name].table_idx is None:
                does[name] = "is preempted"
        for row in schedule.rows:
            last = row.num_computed_tokens + row.num_scheduled_tokens - 1
            does[names[row.seq_id]] = f"computes {row.num_computed_tokens}-{last}"
        owners = ["."] * NUM_BLOCKS
        for name, seq in sequences.items():
            for block in seq.kv.block_table:
                owners[block] = name
        steps.append((does, owners))
        tokens = [[99] for _ in schedule.rows]
        scheduler.update(schedule, StepResult(schedule.step_id, tokens))


def cached_tokens(kv_offload_gib: float | None) -> list[int]:
    """Return how many tokens each prompt found, in a pool that holds one prompt at a time."""
    llm = LLM(
        demo_model.MODEL,
        device="cpu",
        dtype="float32",
        max_model_len=64,
        kvcache_block_size=4,
        num_kvcache_blocks=16,
        kv_offload_gib=kv_offload_gib,
    )
    params = SamplingParams(temperature=0, max_tokens=4)
    prompts = ([token] * 48 for token in (1, 2, 1))
    outputs = [llm.generate({"prompt_token_ids": p}, params, use_tqdm=False)[0] for p in prompts]
    return [output.num_cached_tokens or 0 for output in outputs]


def main() -> None:
    for number, (does, owners) in enumerate(run()):
        words = "".join(f"{name} {what:18}" if what else " " * 20 for name, what in does.items())
        print(f"step {number:2}:", *owners, " ", words.rstrip())

    print("prompts 1, 2, 1 find:", cached_tokens(None), "tokens")
    print("with host memory:    ", cached_tokens(0.01), "tokens")


if __name__ == "__main__":
    main()
