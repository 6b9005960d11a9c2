"""A script written for nano-vllm runs with no change; vLLM's are in test_vllm_examples."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams, demo_model

NANO_VLLM_EXAMPLE = """
import os
from nanovllm import LLM, SamplingParams
from transformers import AutoTokenizer


def main():
    path = os.path.expanduser(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)

    sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
    prompts = [
        "introduce yourself",
        "list all prime numbers within 100",
    ]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for prompt in prompts
    ]
    outputs = llm.generate(prompts, sampling_params)

    for prompt, output in zip(prompts, outputs):
        print("\\n")
        print(f"Prompt: {prompt!r}")
        print(f"Completion: {output['text']!r}")


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def run_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Return a function that runs a script as a program and returns what it printed."""

    def run_script(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text.replace("MODEL", repr(demo_model.MODEL)))
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_script_written_for_nano_vllm_runs(make_llm: Any, run_script: Callable[[str], str]) -> None:
    questions = ["introduce yourself", "list all prime numbers within 100"]
    params = SamplingParams(temperature=0.6, max_tokens=256)
    prompts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in questions]
    outputs = make_llm(demo_model.MODEL).generate(prompts, params, use_tqdm=False)
    assert all(output.text for output in outputs)
    expected = "".join(
        f"\n\nPrompt: {prompt!r}\nCompletion: {output.text!r}\n"
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    assert run_script(NANO_VLLM_EXAMPLE) == expected
