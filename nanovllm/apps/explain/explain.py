"""Records the `Story` of what an engine does with prompts, and shows it: in the terminal as it
comes, or as a page.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.apps.explain import ExplainOptions
from nanovllm.apps.explain.recorder import Recorder
from nanovllm.apps.explain.sampling import SamplingRecorder
from nanovllm.apps.explain.story import Step, Story
from nanovllm.apps.explain.terminal import Terminal
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.llm import LLM
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import writing
from nanovllm.utils.terminal import complain

if TYPE_CHECKING:
    from nanovllm.worker.model_runner import ModelRunner


def explain_prompts(
    llm: LLM, name: str, prompts: list[Any], params: SamplingParams, options: ExplainOptions
) -> None:
    """Generate for all prompts together; show each step, or write the page that `options` name. An
    existing file is overwritten.

    Args:
        name: the model's, for the page's title.

    Raises:
        ConfigError: the page cannot be written.
        InvalidRequestError: a prompt or a parameter is invalid.
    """
    if options.html is None:
        screen = Terminal()
        with recorded(llm.engine, options.num_top, screen.show_step) as story:
            screen.show_facts(story)
            llm.generate(prompts, params, use_tqdm=False)
        screen.show_sequences(story, llm.engine.input_processor.tokenizer)
        return
    with recorded(llm.engine, options.num_top) as story:
        story.model = name
        llm.generate(prompts, params, use_tqdm=False)
    with writing("html", options.html):
        Path(options.html).write_text(page_of(story), encoding="utf-8")
    complain(f"nanovllm: {options.html} shows {len(story.steps)} steps in a browser")


def page_of(story: Story) -> str:
    """Return the page of a story, which holds all it needs: it works without a network."""
    folder = files("nanovllm.apps.explain").joinpath("page")
    page = folder.joinpath("index.html").read_text("utf-8")
    for name in ("style.css", "app.js"):
        page = page.replace(f"{{{{{name}}}}}", folder.joinpath(name).read_text("utf-8"))
    # A text may hold "</script>", or a comment that would hide the script's end.
    data = json.dumps(dataclasses.asdict(story), ensure_ascii=True, separators=(",", ":"))
    return page.replace("{{story}}", data.replace("<", "\\u003c"))


@contextlib.contextmanager
def recorded(
    engine: LLMEngine,
    num_top: int,
    tell: Callable[[Story, Step], object] = lambda story, step: None,
) -> Iterator[Story]:
    """Record what an idle engine in this process does until the block ends, into the story yielded.

    Args:
        num_top: see `SamplingRecorder`.
        tell: is called after each step with the story and its last step.
    """
    info = engine.worker_info
    story = Story(engine.config.model, _facts(engine), info.block_size, info.num_blocks)
    sampling = SamplingRecorder(num_top)

    def add(step: Step) -> None:
        story.steps.append(step)
        _add_texts(story, step, engine)
        tell(story, step)

    recorder = Recorder(add, sampling)
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
