"""Owns the glossary of LLM inference and the small Qwen3 model that answers it.

`entries` is the text the model was trained on; nothing here imports torch.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

MODEL: str = str(_HERE / "model")


def entries() -> list[tuple[str, str]]:
    """Return every (question, answer) of glossary.md, in the order of the file."""
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
