"""Part `grammars`: outputs under grammars are valid on CUDA, and what the masks cost."""

import functools
import importlib.util
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import table

if TYPE_CHECKING:
    from nanovllm import LLM

BATCHES = (1, 16, 64)
TOKENS = 160
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["red", "blue", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
ENDLESS: dict[str, Any] = {"type": "array", "minItems": 1000, "items": SCHEMA}
"""No output of TOKENS tokens ends, so its tokens can be timed."""


def is_object(text: str) -> bool:
    """Return whether `text` is JSON that SCHEMA allows."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and list(found) == ["name", "kind", "size"]
        and len(found["name"]) <= 12
        and found["kind"] in ("red", "blue", "green")
        and found["size"] in range(100)
    )


PATTERN = "[A-Z][a-z]{3,8}-[0-9]{4}"
WORDS = ["yes", "no", "perhaps"]
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json": ({"json": SCHEMA}, is_object),
    "regex": ({"regex": PATTERN}, re.compile(PATTERN).fullmatch),
    "choice": ({"choice": WORDS}, WORDS.__contains__),
}
"""structured_outputs, and what tells whether an output is valid."""


def grammars(record: Record) -> None:
    """Generate under each kind of grammar with and without graphs, then time tokens."""
    if importlib.util.find_spec("llguidance") is None:
        record.add("rows", {"form": "all", "error": "llguidance is not installed"})
        return
    from nanovllm import LLM, demo_model

    for eager in (False, True):
        llm = LLM(
            demo_model.MODEL,
            max_num_seqs=max(BATCHES),
            max_model_len=512,
            enable_prefix_caching=False,
            enforce_eager=eager,
        )
        for form in FORMS:
            label = {"form": form, "eager": eager}
            record.attempt("rows", label, functools.partial(check, llm, form))
        for batch in () if eager else BATCHES:
            record.attempt("times", {"batch": batch}, functools.partial(times, llm, batch))
        llm.shutdown()


def check(llm: "LLM", form: str) -> dict[str, Any]:
    """Return how many outputs ended, and how many of these are valid."""
    from nanovllm import SamplingParams

    grammar, is_valid = FORMS[form]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.5)[seed % 3],
            seed=seed,
            max_tokens=TOKENS,
            structured_outputs={**grammar, "disable_any_whitespace": True},
        )
        for seed in range(max(BATCHES))
    ]
    outputs = llm.generate(["Describe it:"] * len(params), params, use_tqdm=False)
    texts = [output.text for output in outputs if output.finish_reason == "stop"]
    valid = sum(map(bool, map(is_valid, texts)))
    return {"requests": len(params), "ended": len(texts), "valid": valid}


def times(llm: "LLM", batch: int) -> dict[str, Any]:
    """Return the seconds of a token of each row without grammars, and with one in each row."""
    from nanovllm import SamplingParams

    found = {}
    for name, grammar in (("free", None), ("masked", {"json": ENDLESS})):
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True, structured_outputs=grammar
        )
        llm.generate(["Describe it:"] * batch, params, use_tqdm=False)
        start = time.perf_counter()
        llm.generate(["Describe it:"] * batch, params, use_tqdm=False)
        found[name] = (time.perf_counter() - start) / TOKENS
    return found


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of valid outputs, and one of times."""
    rows = []
    for row in figures.get("rows", []):
        cells = [row["form"], "no" if row.get("eager") else "yes"]
        if "error" in row:
            rows.append([*cells, row["error"], "", ""])
        else:
            rows.append([*cells, row["requests"], row["ended"], row["valid"]])
    text = table(["grammar", "graphs", "requests", "ended", "valid"], rows)
    rows = []
    for row in figures.get("times", []):
        if "error" in row:
            rows.append([row["batch"], row["error"], ""])
        else:
            rows.append([row["batch"], *(f"{1e3 * row[name]:.3f}" for name in ("free", "masked"))])
    return [*text, "", *table(["rows", "ms a token, free", "with a grammar"], rows)]


PART = Part(grammars, 45, "Structured outputs", lines)
