"""Lesson 3: keys and values of earlier tokens are kept, so that a step computes new tokens only."""

from typing import Any

import torch

from nanovllm import LLM, SamplingParams, demo_model

PROMPT = "A KV cache is"


def make_llm() -> LLM:
    """Return the shipped model, with room for 8 blocks of 4 tokens each."""
    return LLM(
        demo_model.MODEL,
        device="cpu",
        dtype="float32",
        max_model_len=32,
        kvcache_block_size=4,
        num_kvcache_blocks=8,
        enable_prefix_caching=False,
    )


def kv_cache(llm: LLM) -> list[torch.Tensor]:
    """Return each layer's part of the cache, [2, blocks, tokens of a block, KV heads, head size].

    Index 0 of the first dimension has the keys, 1 the values.
    """
    [layers] = llm.engine.executor.call_all(lambda runner: runner.network.pool.layers)
    return list(layers)


def run(llm: LLM, prompt: str, max_tokens: int) -> list[tuple[int, list[bool], int]]:
    """Generate, and return of each step (tokens computed, which slots are filled then, new token).

    A slot is the place of one token in the cache.
    """
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = engine.input_processor.make_request(prompt, params)
    engine.queue(request)
    [seq] = request.sequences
    steps = []
    while not seq.is_finished:
        schedule: Any = engine.scheduler.schedule()
        result = engine.executor.execute(schedule).result()
        engine.scheduler.update(schedule, result)
        keys = kv_cache(llm)[0][0].flatten(0, 1)  # of the first layer, a row for each slot
        filled = [bool(row.any()) for row in keys]
        steps.append((schedule.num_tokens, filled, seq.token_ids[-1]))
    return steps


def main() -> None:
    llm = make_llm()
    layers = kv_cache(llm)
    print(len(layers), "layers, each", list(layers[0].shape))
    print("bytes of a token:", sum(layer[:, 0, 0].nbytes for layer in layers))

    tokenizer: Any = llm.get_tokenizer()
    steps = run(llm, PROMPT, max_tokens=5)
    for number, (computed, filled, token) in enumerate(steps):
        slots = "".join("#" if is_filled else "." for is_filled in filled)
        blocks = " ".join(slots[start : start + 4] for start in range(0, 32, 4))
        print(f"step {number}: computes {computed}  {blocks}  draws {tokenizer.decode([token])!r}")

    with_cache = sum(computed for computed, _, _ in steps)
    without = sum(sum(filled) for _, filled, _ in steps)  # all tokens, again in each step
    print(f"tokens computed: {with_cache} with the cache, {without} without")


if __name__ == "__main__":
    main()
