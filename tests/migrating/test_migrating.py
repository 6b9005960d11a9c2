"""The page for those who come from vLLM or nano-vllm has every name."""

from nanovllm import LLM, AsyncLLM
from nanovllm.advice import METHODS
from nanovllm.options.other_names import (
    CONFIG_NAMES,
    KEYWORDS,
    SAMPLING_NAMES,
    SERVE_NAMES,
    SPECULATIVE_NAMES,
)
from tools import migrating


def test_page_for_migrating_is_current() -> None:
    text = migrating.PAGE.read_text("utf-8")
    assert migrating.page() == text, "run python -m tools.migrating"
    assert [mark for _, mark, _ in migrating.PART.findall(text)] == list(migrating.PARTS)


def test_page_for_migrating_has_every_name() -> None:
    text = migrating.PAGE.read_text("utf-8")
    names = [
        *CONFIG_NAMES,
        *SPECULATIVE_NAMES,
        *SAMPLING_NAMES,
        *METHODS,
        *KEYWORDS,
        *SERVE_NAMES,
    ]
    for name in names + migrating.methods(LLM) + migrating.methods(AsyncLLM):
        assert f"`{name}`" in text
