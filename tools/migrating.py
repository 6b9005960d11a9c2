"""Fills the tables of docs/migrating.md with the names in the code: `python -m tools.migrating`."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm import LLM, AsyncLLM, outputs, vllm
from nanovllm.advice import IMPORTS, METHODS
from nanovllm.apps.server.absent_routes import ABSENT_ROUTES
from nanovllm.options.config import Config
from nanovllm.options.other_names import (
    CONFIG_NAMES,
    CONFIG_VALUES,
    KEYWORDS,
    REQUEST_NAMES,
    SAMPLING_NAMES,
    SERVE_NAMES,
    SPECULATIVE_METHODS,
    SPECULATIVE_NAMES,
    OtherName,
)
from nanovllm.options.sampling_params import SamplingParams

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
PART = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)

NANO_VLLM = {
    Config: """model max_num_batched_tokens max_num_seqs max_model_len gpu_memory_utilization
        tensor_parallel_size enforce_eager hf_config eos kvcache_block_size num_kvcache_blocks""",
    SamplingParams: "temperature max_tokens ignore_eos",
    LLM: "generate add_request step is_finished exit",
    outputs.RequestOutput: "text token_ids",
}
"""The names that nano-vllm's users write, by the class here that must have them."""


def page() -> str:
    """Return the text of the page with new tables."""
    return PART.sub(
        lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", PAGE.read_text("utf-8")
    )


def table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def listed(names: Iterable[str]) -> str:
    """Return a paragraph of names, in lines of 120 characters."""
    text = ", ".join(f"`{name}`" for name in names)
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def others(names: Mapping[str, OtherName]) -> str:
    """Return a table of names that are not fields; those with the same advice share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, other in names.items():
        accepted = ", ".join(f"`{value!r}`" for value in other.accepted)
        rows.setdefault((accepted, other.advice), []).append(f"`{name}`")
    return table(
        ("Name", "Accepted, besides None", "For anything else"),
        ((", ".join(found), *cells) for cells, found in rows.items()),
    )


def other_values() -> str:
    """Return a table of vLLM's values that fields do not take."""
    rows: dict[tuple[str, str], list[str]] = {}
    tables = {f"`{field}`": advices for field, advices in CONFIG_VALUES.items()}
    tables["`speculative_config`'s `method`"] = SPECULATIVE_METHODS
    for field, advices in tables.items():
        for value, other in advices.items():
            rows.setdefault((field, other.advice), []).append(f"`{value!r}`")
    return table(
        ("Field", "vLLM's values", "Here"),
        ((field, ", ".join(found), advice) for (field, advice), found in rows.items()),
    )


def methods(owner: type[Any]) -> list[str]:
    """Return the names of the public methods of a class."""
    names = dict.fromkeys(n for cls in owner.__mro__ if cls is not object for n in vars(cls))
    return [name for name in names if not name.startswith("_")]


def advices(names: Mapping[str, str]) -> str:
    """Return a table of names that are not here; those with the same advice share a row."""
    rows: dict[str, list[str]] = {}
    for name, advice in names.items():
        rows.setdefault(advice, []).append(f"`{name}`")
    return table(("Name", "Here"), ((", ".join(found), advice) for advice, found in rows.items()))


def nano_vllm() -> str:
    """Return a table of nano-vllm's names."""
    rows = []
    for owner, names in NANO_VLLM.items():
        for name in names.split():
            known = name in dir(owner) or name in getattr(owner, "__dataclass_fields__", ())
            advice = CONFIG_NAMES[name].advice if name in CONFIG_NAMES else "not there"
            rows.append((owner.__name__, f"`{name}`", "the same" if known else advice))
    return table(("Class", "Name", "Here"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "names": lambda: listed(vllm.__all__),
    "missing names": lambda: advices(IMPORTS),
    "Config's other names": lambda: others(CONFIG_NAMES),
    "SpeculativeConfig's other names": lambda: others(SPECULATIVE_NAMES),
    "Config's other values": other_values,
    "SamplingParams' other names": lambda: others(SAMPLING_NAMES),
    "LLM's methods": lambda: listed(methods(LLM)),
    "AsyncLLM's methods": lambda: listed(methods(AsyncLLM)),
    "vLLM's further methods": lambda: listed(
        name for name in methods(vllm.LLM) if name not in methods(LLM)
    ),
    "LLMEngine's methods": lambda: listed(methods(vllm.LLMEngine)),
    "other keywords": lambda: others(KEYWORDS),
    "other methods": lambda: advices(METHODS),
    "flags of the server": lambda: others(SERVE_NAMES),
    "fields of requests": lambda: others(REQUEST_NAMES),
    "other routes": lambda: advices(ABSENT_ROUTES),
    "nano-vllm's names": nano_vllm,
}
"""The text to put after each mark `<!-- made: ... -->` in the page."""

if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
