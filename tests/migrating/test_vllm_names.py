"""What pages and messages say of vLLM's names, and of what is here, agrees with the code."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams, StructuredOutputsParams, demo_model
from nanovllm.advice import LACKS, METHODS
from nanovllm.apps.server.options import ServerOptions
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.models.registry import MODULES
from nanovllm.options.config import EXECUTOR_BACKENDS, Config
from nanovllm.options.other_names import (
    CONFIG_NAMES,
    SAMPLING_NAMES,
    SERVE_NAMES,
    STRUCTURED_NAMES,
)
from nanovllm.vllm import LLM, AsyncLLM, LLMEngine
from tests.migrating import vllm_names

ROOT = Path(__file__).parents[2]
FIELDS = [
    (Config, CONFIG_NAMES, vllm_names.ENGINE_ARGS),
    (SamplingParams, SAMPLING_NAMES, vllm_names.SAMPLING_PARAMS),
    (StructuredOutputsParams, STRUCTURED_NAMES, vllm_names.STRUCTURED_OUTPUTS),
    (ServerOptions, SERVE_NAMES, vllm_names.SERVER_ARGS),  # api_key is api_keys here
]
CLASSES = [
    (LLM, vllm_names.LLM_METHODS),
    (AsyncLLM, vllm_names.ASYNC_LLM_METHODS),
    (LLMEngine, vllm_names.LLM_ENGINE_METHODS),
]


@pytest.mark.parametrize(("owner", "others", "names"), FIELDS)
def test_every_field_of_vllms_is_here_or_says_what_to_use(
    owner: Any, others: dict[str, Any], names: str
) -> None:
    """Symptom: 185 of 260 options of vLLM's are unknown, and the page says that each has a row."""
    known = {field.name for field in dataclasses.fields(owner)}
    assert [name for name in names.split() if name not in known | others.keys()] == []
    assert known.isdisjoint(others)


@pytest.mark.parametrize(("owner", "names"), CLASSES)
def test_every_method_of_vllms_is_here_or_says_what_to_use(owner: Any, names: str) -> None:
    known = {*dir(owner), *METHODS, *LACKS.get(owner.__name__, {})}
    assert [name for name in names.split() if name not in known] == []
    assert {*LACKS.get(owner.__name__, {})}.isdisjoint(dir(owner))


def test_every_route_of_vllms_is_here_or_says_what_to_use() -> None:
    """A path is one of the app's, or its 404 names a remedy; and no remedy hides a route."""
    pytest.importorskip("fastapi")
    from nanovllm.apps.server import absent_routes
    from nanovllm.apps.server.app import ROUTERS

    here = {route.path for router in ROUTERS for route in router.routes}
    absent = absent_routes.ABSENT_ROUTES
    assert [path for path in vllm_names.ROUTES.split() if path not in here | absent.keys()] == []
    assert here.isdisjoint(absent)


IS_HERE = {
    "LoRA": "enable_lora" in vars(Config),
    "Ray": "ray" in EXECUTOR_BACKENDS,
    "experts": any("Moe" in name for name in MODULES),
    "GGUF": (ROOT / "nanovllm/loading/gguf.py").exists(),
    "speculation": hasattr(Config, "speculative_config"),
    "beam search": hasattr(LLM, "beam_search"),
    "embeddings": hasattr(LLM, "embed"),
}
"""By a feature's name in pages and messages: whether the code has it."""
ABSENT = r"(not there|not here|what is not here|not supported|not implemented|missing)"


def denies(sentence: str, feature: str) -> bool:
    """Whether a sentence says that there is no such feature."""
    forms = (rf"\b(has|have|is|are) no (\w+ )?{feature}\b", rf"\b{feature}\b.*\b{ABSENT}\b")
    return any(re.search(form, sentence) for form in (*forms, rf"{ABSENT}\b.*\b{feature}\b"))


PAGES = [*(ROOT / "docs").glob("*.md")]


def sentences(text: str) -> list[str]:
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    return [" ".join(part.split()) for part in re.split(r"[.;|]\s|\n\n|\n- ", text)]


def test_no_page_and_no_message_denies_what_is_here() -> None:
    """Symptom: two pages deny LoRA and Ray, and a message says that no model has experts."""
    texts = {path.name: path.read_text("utf-8") for path in PAGES}
    texts["README.md"] = (ROOT / "README.md").read_text("utf-8")
    for path in [
        *(ROOT / "nanovllm" / name for name in ("advice.py", "vllm.py", "options/other_names.py")),
        *(ROOT / "nanovllm/apps/server").rglob("*.py"),
    ]:
        strings = re.findall(r'"((?:[^"\\\n]|\\.)*)"', path.read_text("utf-8"))
        texts[path.name] = "\n\n".join(strings)
    assert not IS_HERE["beam search"]
    found = [
        (name, sentence)
        for name, text in texts.items()
        for sentence in sentences(text)
        for feature, is_here in IS_HERE.items()
        if is_here and denies(sentence, feature)
    ]
    assert found == []
    for before in ("not there: beam search, LoRA", "Examples of LoRA need what is not here"):
        assert denies(before, "LoRA")
    assert denies("the models here have no experts", "experts")


def test_a_tag_in_text_is_a_grammar() -> None:
    """structural_tag's remedy."""
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tag = llguidance.StructTag(trigger="<call", begin="<call=f>", grammar=schema, end="</call>")
    grammar = llguidance.StructTag.to_grammar([tag], assume_special=False)
    text = (Path(demo_model.MODEL) / "tokenizer.json").read_text("utf-8")
    compiler = GrammarCompiler(lambda: text, 1024, (0,))
    matcher = compiler.matcher(StructuredOutputsParams(grammar=grammar))
    tokenizer = compiler._make_tokenizer()[0]
    for output, fits in (('Hi <call=f>{"a": 1}</call> x', True), ('<call=f>{"b": 1}', False)):
        tokens = tokenizer.greedy_tokenize(output)
        assert (matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) == fits
