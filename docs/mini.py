"""The engine in one file: the real scheduler, block manager and model runner, and the loop.

    python docs/mini.py [MODEL]

This is the mental model, in code that runs. `nanovllm.LLM` drives the same three objects. It adds
what a user needs around them: threads that share the engine, streams, stop strings, chat templates,
several ranks, faster steps (recordings and CUDA graphs), and every feature that an option asks for.

    prompt -> Sequence -> Schedule -> StepResult -> Sequence -> text

1. A prompt becomes a `Sequence`: its token ids, and how many of them are computed.
2. `Scheduler.schedule()` picks sequences and tokens for one step. It asks the `BlockManager` for
   cached prefixes and for KV blocks. What it returns, a `Schedule`, holds numbers only.
3. `ModelRunner.execute()` runs the model over these tokens, writes their keys and values into the
   blocks, and draws a token for each sequence whose tokens are then all computed.
4. `Scheduler.update()` appends these tokens to the sequences. Finished ones give back their blocks.
"""

import itertools
import sys
from typing import Any

from nanovllm import Config, SamplingParams, demo_model
from nanovllm.core.messages import Schedule
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.loading.hub import configured_checkpoint
from nanovllm.loading.tokenizer import serving_tokenizer
from nanovllm.parallel.rank_setup import check_network
from nanovllm.platform.cpu import CPU
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.warm_up import allocate, measure


class MiniLLM:
    """A model on the CPU, for one thread.

    Args:
        model: a directory with safetensors and a tokenizer, a GGUF file, or a hub id. All of its
            layers attend to all tokens.
        options: fields of `Config`, such as num_kvcache_blocks and max_num_batched_tokens.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = Config(model=model, device="cpu", **options)
        checkpoint = configured_checkpoint(config)  # its files, and config.json
        tokenizer = serving_tokenizer(checkpoint)
        assert tokenizer is not None
        self.tokenizer = tokenizer

        # The worker's side: tensors. The network with its weights, the KV cache, and the tables,
        # with a row for each running sequence: its tokens, its blocks, its sampling parameters.
        self.runner = ModelRunner(check_network(config, checkpoint), CPU())
        info = measure(self.runner)  # runs the largest step, and says how many blocks then fit
        info = allocate(self.runner, info)

        # The scheduler's side: numbers. It never sees a tensor, and the runner never a `Sequence`.
        self.block_manager = BlockManager(info.num_blocks, info.block_size)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
        )
        self._seq_ids = itertools.count()

    def add_request(self, prompt: str, params: SamplingParams) -> Sequence:
        """Queue a prompt. It waits until there is a table row and room in the KV cache for it."""
        seq = Sequence(next(self._seq_ids), self.tokenizer.encode(prompt), params)
        self.scheduler.add(seq)
        return seq

    def step(self) -> Schedule | None:
        """Run one step and return what was scheduled, None if nothing waits or runs.

        The step has no phase. A sequence has `num_tokens` and `num_computed_tokens`, and the step
        closes some of the gap: all of a short prompt, a chunk of a long one, or the one token that
        the last step drew. One batch may hold all three.
        """
        schedule = self.scheduler.schedule()
        if schedule is None:
            return None
        result = self.runner.execute(schedule).result()
        self.scheduler.update(schedule, result)
        return schedule

    def generate(self, prompts: list[str], params: SamplingParams) -> list[str]:
        """Return the text that follows each prompt."""
        sequences = [self.add_request(prompt, params) for prompt in prompts]
        while not all(seq.is_finished for seq in sequences):
            self.step()
        return [self.text(seq) for seq in sequences]

    def text(self, seq: Sequence) -> str:
        """Return the text of what was generated, so far."""
        output = seq.token_ids[seq.num_prompt_tokens :]
        return self.tokenizer.decode(output, skip_special_tokens=True)


def describe(schedule: Schedule) -> str:
    """Return a line about a step: what each row computes, and the blocks of new sequences."""
    rows = ", ".join(
        f"sequence {row.seq_id}: tokens {row.num_computed_tokens} to "
        f"{row.num_computed_tokens + row.num_scheduled_tokens - 1}{' and draws' * row.samples}"
        for row in schedule.rows
    )
    given = [f"blocks {new.block_ids} to sequence {new.seq_id}" for new in schedule.admissions]
    return f"step {schedule.step_id}: {rows}" + "".join(f"; {line}" for line in given)


def main() -> None:
    """Follow two prompts that begin alike through their steps, the second after the first."""
    model = sys.argv[1] if len(sys.argv) > 1 else demo_model.MODEL
    llm = MiniLLM(model, max_model_len=256, num_kvcache_blocks=32, max_num_batched_tokens=48)
    params = SamplingParams(temperature=0, max_tokens=4)
    start = "Paged attention keeps the KV cache in fixed-size blocks that need not be contiguous. "
    for prompt in (start * 3 + "It", start * 3 + "A block table"):
        seq = llm.add_request(prompt, params)
        while not seq.is_finished:
            schedule = llm.step()
            assert schedule is not None
            sys.stdout.write(f"{describe(schedule)}\n")
        cached = f"{seq.num_cached_tokens} of {seq.num_prompt_tokens} tokens were cached"
        sys.stdout.write(f"{cached}; text: {llm.text(seq)!r}\n")


if __name__ == "__main__":
    main()
