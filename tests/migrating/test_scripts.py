"""Scripts written for vLLM and for nano-vllm run with no change but the import."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams, demo_model

VLLM_EXAMPLE = """
from nanovllm import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    # Create an LLM.
    llm = LLM(model=MODEL)
    # Generate texts from the prompts.
    # The output is a list of RequestOutput objects
    # that contain the prompt, generated text, and other information.
    outputs = llm.generate(prompts, sampling_params)
    # Print the outputs.
    print("\\nGenerated Outputs:\\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
"""

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


def test_script_written_for_vllm_runs(make_llm: Any, run_script: Callable[[str], str]) -> None:
    """The default seed is fixed, so an engine here generates the same text as the script's."""
    prompts = ["Hello, my name is", "The president of the United States is"]
    prompts += ["The capital of France is", "The future of AI is"]
    params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = make_llm(demo_model.MODEL).generate(prompts, params, use_tqdm=False)
    assert all(output.text for output in outputs)
    rule = "-" * 60 + "\n"
    expected = "\nGenerated Outputs:\n" + rule
    for prompt, output in zip(prompts, outputs, strict=True):
        expected += f"Prompt:    {prompt!r}\nOutput:    {output.text!r}\n" + rule
    assert run_script(VLLM_EXAMPLE) == expected


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
