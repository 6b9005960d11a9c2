import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from tests.vision.pictures import add_tokenizer
from tests.vision.qwen import PROCESSOR, SPECIAL, TEMPLATE, make_model

FEW = {
    "max_model_len": 384,
    "max_num_seqs": 4,
    "kvcache_block_size": 32,
    "num_kvcache_blocks": 64,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a random checkpoint of "qwen3_vl" or "qwen3_5", with a tokenizer and a template."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            path = made[kind] = tmp_path_factory.mktemp(kind)
            ids = add_tokenizer(path, SPECIAL, TEMPLATE)
            make_model(kind, ids).save_pretrained(path)
            (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        return made[kind]

    return make


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(path: Path, **options: Any) -> LLM:
        made.append(LLM(str(path), **{**FEW, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="module")
def llm(qwen: Callable[[str], Path]) -> Iterator[LLM]:
    """A random Qwen3-VL in bfloat16."""
    llm = LLM(str(qwen("qwen3_vl")), dtype="bfloat16", **FEW)
    yield llm
    llm.shutdown()
