"""Lesson 2: logits become probabilities, and a draw takes one token."""

from collections import Counter
from typing import Any

import torch

from nanovllm import LLM, SamplingParams, demo_model

PROMPT = "Chunked"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.6},
)


def make_llm() -> LLM:
    """Return the shipped model, which reports the probabilities that it draws from.

    It reports logprobs: their logarithms. "Processed" ones come after temperature and filters.
    """
    mode = "processed_logprobs"
    return LLM(
        demo_model.MODEL, device="cpu", dtype="float32", max_model_len=128, logprobs_mode=mode
    )


def probabilities(llm: LLM, prompt: str, **setting: Any) -> dict[str, float]:
    """Return the probability of the four most likely next tokens, by text."""
    params = SamplingParams(max_tokens=1, logprobs=4, **setting)
    output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    likely = sorted(output.logprobs[0].values(), key=lambda item: item.rank or 0)[:4]
    return {
        item.decoded_token or "": float(torch.tensor(item.logprob).exp())
        for item in likely
        if item.logprob > float("-inf")
    }


def draws(llm: LLM, prompt: str, count: int) -> Counter[str]:
    """Return how often each text is the next one in `count` draws at temperature 1."""
    params = SamplingParams(max_tokens=1, n=count, seed=0)
    return Counter(
        output.text for output in llm.generate(prompt, params, use_tqdm=False)[0].outputs
    )


def main() -> None:
    llm = make_llm()
    for setting in SETTINGS:
        found = probabilities(llm, PROMPT, **setting)
        shown = "  ".join(f"{text!r} {share:.2f}" for text, share in found.items())
        print(", ".join(f"{name}={value}" for name, value in setting.items()) + ":", shown)

    counts = draws(llm, PROMPT, 500).most_common(3)
    print("500 draws:", ", ".join(f"{text!r} {count / 500:.2f}" for text, count in counts))

    for seed in (1, 2, 2):
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
        print(f"seed {seed}:", repr(llm.generate(PROMPT, params, use_tqdm=False)[0].text))


if __name__ == "__main__":
    main()
