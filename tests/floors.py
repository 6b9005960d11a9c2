"""The floors of the package, from its folders: what an engine may have, and what stands on it."""

from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nanovllm"


def _folders(floor: str) -> list[str]:
    return sorted(path.parent.name for path in (PACKAGE / floor).glob("*/__init__.py"))


FEATURES = _folders("features")
"""Each can be deleted: an engine knows it by one seam, and imports it when an option asks."""
APPS = _folders("apps")
"""Each can be deleted, and stands on `LLM` and `AsyncLLM`."""
