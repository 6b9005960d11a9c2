"""Records the `Story` of what an engine does while prompts are generated."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nanovllm.apps.explain.recorder import Recorder
from nanovllm.apps.explain.sampling import SamplingRecorder
from nanovllm.apps.explain.story import Step, Story
from nanovllm.apps.explain.xray import Xray
from nanovllm.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from nanovllm.worker.model_runner import ModelRunner


@contextlib.contextmanager
def recorded(
    engine: LLMEngine,
    num_top: int,
    tell: Callable[[Story, Step], object],
    xray: Xray | None = None,
) -> Iterator[Story]:
    """Record what an engine in this process does until the block ends, into the story yielded.

    Args:
        num_top: see `SamplingRecorder`.
        tell: is called after each step with the story and its last step.
        xray: tells the parts of each step; None: steps have none.
    """
    info = engine.worker_info
    story = Story(engine.config.model, _facts(engine), info.block_size, info.num_blocks)
    sampling = SamplingRecorder(num_top)

    def add(step: Step) -> None:
        story.steps.append(step)
        _add_texts(story, step, engine)
        tell(story, step)

    if xray is not None and xray.rates is not None:
        story.facts["machine"] = xray.rates.summary()
    recorder = Recorder(add, sampling, xray)
    story.sequences = recorder.sequences
    engine.observers.append(recorder)
    engine.executor.call_all(_set_watch, sampling)
    try:
        yield story
    finally:
        engine.observers.remove(recorder)
        if not engine.is_shut_down:
            engine.executor.call_all(_set_watch, None)


def _set_watch(runner: "ModelRunner", watch: SamplingRecorder | None) -> None:
    runner.watch = watch


def _facts(engine: LLMEngine) -> dict[str, str]:
    """Return how the engine was set up, in words."""
    config, info = engine.config, engine.worker_info
    [found] = engine.executor.call_all(_runner_facts)
    return {
        **found,
        "quantization": config.quantization or "as the checkpoint",
        "KV pool": f"{info.num_blocks} blocks of {info.block_size} tokens",
        "max_num_batched_tokens": f"{info.max_num_batched_tokens}",
        "max_num_seqs": f"{config.max_num_seqs}",
        "max_model_len": f"{info.max_model_len}",
        "prefix cache": "on" if config.enable_prefix_caching else "off",
        "speculation": "off" if config.speculation is None else config.speculation.method,
    }


def _runner_facts(runner: "ModelRunner") -> dict[str, str]:
    network = runner.network
    ways = (type(each).__name__ for each in runner.step_runners)
    backends = dict.fromkeys(type(each).__name__ for each in network.attention.backends)
    return {
        "device": f"{runner.device}",
        "dtype": str(network.model_config.dtype).removeprefix("torch."),
        "attention": ", ".join(backends),
        "steps": " or ".join([*ways, "layer by layer"]),
    }


def _add_texts(story: Story, step: Step, engine: LLMEngine) -> None:
    """Add the texts of the tokens that a step names."""
    tokenizer = engine.input_processor.tokenizer
    named: set[int] = set()
    for row in step.rows:
        named.update(row.token_ids, row.output)
        for sample in row.samples:
            named.update(sample.candidates)
    for token_id in named - story.texts.keys():
        text = "" if tokenizer is None else tokenizer.decode([token_id])
        if "\N{REPLACEMENT CHARACTER}" in text or not text:  # a part of a character
            entry = None if tokenizer is None else tokenizer.convert_ids_to_tokens([token_id])[0]
            text = entry or f"<{token_id}>"
        story.texts[token_id] = text
