"""Lesson 1: a model turns token ids into one number for each token of its vocabulary."""

from typing import Any

import torch

from nanovllm import LLM, SamplingParams, demo_model

PROMPT = "A KV cache is"


def make_llm() -> LLM:
    """Return the shipped model, in float32: the numbers are then the same on every machine."""
    return LLM(demo_model.MODEL, device="cpu", dtype="float32", max_model_len=128)


def next_logits(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """Return the logits [1024] of the token after `token_ids`."""
    seen: list[torch.Tensor] = []

    def look(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())  # `output` has the tokens drawn so far: none here
        return logits

    params = SamplingParams(temperature=0, max_tokens=1, logits_processors=[look])
    llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
    return seen[0]


def follow(llm: LLM, token_ids: list[int], num_steps: int) -> list[tuple[list[int], torch.Tensor]]:
    """Return (token ids, logits after them) of each step: the largest logit is the next token."""
    steps = []
    for _ in range(num_steps):
        logits = next_logits(llm, token_ids)
        steps.append((token_ids, logits))
        token_ids = [*token_ids, int(logits.argmax())]
    return steps


def main() -> None:
    llm = make_llm()
    tokenizer: Any = llm.get_tokenizer()
    token_ids = tokenizer.encode(PROMPT)
    print(PROMPT, "->", token_ids, "->", [tokenizer.decode([token]) for token in token_ids])
    print("preemption ->", [tokenizer.decode([t]) for t in tokenizer.encode("preemption")])

    for known, logits in follow(llm, token_ids, num_steps=4):
        values, tokens = logits.topk(3)
        best = [
            f"{tokenizer.decode([token])!r} {value:.1f}"
            for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
        ]
        print(f"after {len(known)} tokens, {len(logits)} logits:", ", ".join(best))

    params = SamplingParams(temperature=0, max_tokens=4)
    print(repr(llm.generate(PROMPT, params, use_tqdm=False)[0].text))


if __name__ == "__main__":
    main()
