"""Time the scheduler alone: schedule() and update() with 64 sequences decoding, while more and more
requests wait for the KV blocks or table rows that these hold.

The cost of a step depends on the running sequences, not on the waiting ones: the ratios in the last
column stay near 1.
"""

import gc
import time
from statistics import median

from benchmarks.harness import Table, make_parser
from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.scheduler import Scheduler

NUM_RUNNING = 64
PROMPT_LEN = 512
BLOCK_SIZE = 256
WAITING_PROMPT = list(range(8))


def make_scheduler(blocked_by: str, num_waiting: int, num_steps: int) -> Scheduler:
    """Return a scheduler with NUM_RUNNING decoding sequences, and others that cannot start."""
    blocks_per_seq = -(-(PROMPT_LEN + num_steps + 2) // BLOCK_SIZE)
    num_blocks = NUM_RUNNING * blocks_per_seq
    spare = num_blocks - NUM_RUNNING * (PROMPT_LEN // BLOCK_SIZE)
    head_len = (spare + 1) * BLOCK_SIZE  # one block more than is ever free
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=NUM_RUNNING * (1 if blocked_by == "table rows" else 2),
        max_num_batched_tokens=NUM_RUNNING * PROMPT_LEN,
        max_model_len=num_blocks * BLOCK_SIZE,
    )
    params = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
    for seq_id in range(NUM_RUNNING):
        scheduler.add(Sequence(seq_id, [seq_id] * PROMPT_LEN, params))
    step(scheduler)
    for i in range(num_waiting):
        prompt = [0] * head_len if i == 0 else WAITING_PROMPT
        scheduler.add(Sequence(NUM_RUNNING + i, prompt, params))
    step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    """Schedule a step and return its tokens to the scheduler, like a worker that takes no time."""
    schedule = scheduler.schedule()
    assert schedule is not None
    assert len(schedule.rows) == NUM_RUNNING
    scheduler.update(schedule, StepResult(schedule.step_id, [[1]] * NUM_RUNNING))


def median_step_us(blocked_by: str, num_waiting: int, num_steps: int) -> float:
    """Return the median microseconds of a step."""
    scheduler = make_scheduler(blocked_by, num_waiting, num_steps)
    gc.collect()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step(scheduler)
        times.append(time.perf_counter() - start)
    assert scheduler.num_waiting == num_waiting, "a waiting request was admitted"
    return median(times) * 1e6


def main() -> None:
    """Print the table."""
    parser = make_parser("scheduler", __doc__, model=False, rounds=None)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=400, help="steps to time for each row")
    args = parser.parse_args()
    table = Table("blocked by", "waiting", "microseconds a step", "ratio")
    for blocked_by in ("blocks", "table rows"):
        baseline = 0.0
        for num_waiting in args.waiting:
            us = median_step_us(blocked_by, num_waiting, args.steps)
            baseline = baseline or us
            table.row(blocked_by, num_waiting, us, us / baseline)


if __name__ == "__main__":
    main()
