"""What pages and messages say of what is here agrees with the code."""

import re
from pathlib import Path

import pytest

from nanovllm import StructuredOutputsParams, demo_model
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.models.registry import MODULES
from nanovllm.options.config import EXECUTOR_BACKENDS, Config
from nanovllm.vllm import LLM

ROOT = Path(__file__).parents[2]
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
        *(ROOT / "nanovllm" / name for name in ("vllm.py", "options/other_names.py")),
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
