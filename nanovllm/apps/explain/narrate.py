"""`--narrate`: one line for each step of an engine."""

import contextlib
from collections.abc import Callable, Iterator

from nanovllm.apps.explain.recorder import Recorder
from nanovllm.apps.explain.story import RowStory, Step
from nanovllm.engine.llm_engine import LLMEngine

_MAX_ROWS = 4
"""Rows that a line describes; it counts the others."""


@contextlib.contextmanager
def narrated(engine: LLMEngine, write: Callable[[str], object]) -> Iterator[None]:
    """Call `write` with a line for each step of the engine, until the block ends."""
    tokenizer = engine.input_processor.tokenizer
    num_blocks = engine.worker_info.num_blocks

    def text(token_ids: list[int]) -> str:
        return f"{token_ids}" if tokenizer is None else repr(tokenizer.decode(token_ids))

    def tell(step: Step) -> None:
        write(line(step, num_blocks, text))

    recorder = Recorder(tell)
    engine.observers.append(recorder)
    try:
        yield
    finally:
        engine.observers.remove(recorder)


def line(step: Step, num_blocks: int, text: Callable[[list[int]], str]) -> str:
    """Return a step in one line.

    Args:
        num_blocks: of the KV pool.
        text: returns what is shown of tokens.
    """
    parts = [_row(row, text) for row in step.rows[:_MAX_ROWS]]
    if len(step.rows) > _MAX_ROWS:
        others = step.rows[_MAX_ROWS:]
        num_tokens = sum(row.num_tokens for row in others)
        parts.append(f"{len(others)} more rows with {num_tokens} tokens")
    parts += [f"#{note.sequence} is preempted: {note.text}" for note in step.preempted]
    if len(step.waiting) == 1:
        parts.append(f"#{step.waiting[0].sequence} waits: {step.waiting[0].text}")
    elif step.waiting:
        parts.append(f"{len(step.waiting)} wait, first #{step.waiting[0].sequence}")
    parts += [f"#{note.sequence} ends ({note.text})" for note in step.ended[:_MAX_ROWS]]
    parts.append(f"{step.num_used_blocks} of {num_blocks} blocks")
    return f"step {step.number}: {'; '.join(parts)}; {1000 * sum(step.seconds.values()):.1f} ms"


def _row(row: RowStory, text: Callable[[list[int]], str]) -> str:
    """Return a row in words, such as "#0 computes 64 prompt tokens of 200 from 0"."""
    if row.kind == "decode":
        done = f"#{row.sequence} at {row.start}"
    elif row.num_tokens == row.num_missing:
        done = f"#{row.sequence} computes {row.num_tokens} tokens"
    else:
        done = f"#{row.sequence} computes {row.num_tokens} of {row.num_missing} tokens"
    if row.num_cached_tokens:
        done += f", {row.num_cached_tokens} were cached"
    if row.num_drafts:
        done += f", {max(len(row.output) - 1, 0)} drafts accepted"
    return f"{done} -> {text(row.output)}" if row.output else done
