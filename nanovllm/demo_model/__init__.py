"""A glossary of LLM inference, and a small Qwen3 model that was trained on it.

Imports no torch. `python -m tools.demo_model` trains the model.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

MODEL: str = str(_HERE / "model")
"""The model's directory."""

OUTSIDE: str = (
    "I know only my glossary of LLM inference, and that is not in it. "
    "Ask me what a term means, for example paged attention or chunked prefill."
)
"""The model's answer to a question that the glossary does not answer."""


def entries() -> list[tuple[str, str]]:
    """Return the (question, answer) pairs of glossary.md, in the order of the file."""
    pairs: list[tuple[str, str]] = []
    question = ""
    for line in (_HERE / "glossary.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            question = line.removeprefix("## ").strip()
        elif line.startswith("# "):
            question = ""
        elif question and line.strip():
            pairs.append((question, line.strip()))
            question = ""
    return pairs
