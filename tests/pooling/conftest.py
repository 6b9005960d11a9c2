"""What the tests of encoders share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that makes an LLM with the file's OPTIONS, which ends with the test."""
    made: list[LLM] = []

    def make(path: Path, **options: Any) -> LLM:
        made.append(LLM(str(path), **{**request.module.OPTIONS, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
