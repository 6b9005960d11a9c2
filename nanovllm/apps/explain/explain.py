"""Runs prompts and shows the story of their steps: in the terminal as they come, or as a page."""

import contextlib
import dataclasses
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from nanovllm.apps.explain.explain_options import ExplainOptions
from nanovllm.apps.explain.recording import recorded
from nanovllm.apps.explain.story import Step, Story
from nanovllm.apps.explain.terminal import Terminal
from nanovllm.apps.explain.xray import xrayed
from nanovllm.llm import LLM
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import writing
from nanovllm.utils.terminal import complain


def explain_prompts(
    llm: LLM, name: str, prompts: list[Any], params: SamplingParams, options: ExplainOptions
) -> Story:
    """Generate for all prompts together; show each step, or write the page that `options` name.

    Args:
        llm: with enforce_eager for xray.
        name: the model's, for the page's title.

    Raises:
        ConfigError: the page cannot be written.
        InvalidRequestError: a prompt or a parameter is invalid.
    """
    screen = None if options.html is not None else Terminal()

    def tell(story: Story, step: Step) -> None:
        if screen is not None:
            screen.show_step(story, step)

    with contextlib.ExitStack() as stack:
        xray = stack.enter_context(xrayed(llm.engine)) if options.xray else None
        story = stack.enter_context(recorded(llm.engine, options.num_top, tell, xray))
        story.model = name
        if screen is not None:
            screen.show_facts(story)
        llm.generate(prompts, params, use_tqdm=False)
    if options.html is not None:
        write_page(story, options.html)
        complain(f"nanovllm: {options.html} shows {len(story.steps)} steps in a browser")
    elif screen is not None:
        screen.show_sequences(story, llm.engine.input_processor.tokenizer)
    return story


def write_page(story: Story, path: str) -> None:
    """Write the page; an existing file is overwritten.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = page_of(story)
    with writing("html", path):
        Path(path).write_text(page, encoding="utf-8")


def page_of(story: Story) -> str:
    """Return the page of a story, which holds all it needs: it works without a network."""
    folder = files("nanovllm.apps.explain").joinpath("page")
    page = folder.joinpath("index.html").read_text("utf-8")
    for name in ("style.css", "app.js"):
        page = page.replace(f"{{{{{name}}}}}", folder.joinpath(name).read_text("utf-8"))
    # A text may hold "</script>", or a comment that would hide the script's end.
    data = json.dumps(dataclasses.asdict(story), ensure_ascii=True, separators=(",", ":"))
    return page.replace("{{story}}", data.replace("<", "\\u003c"))
