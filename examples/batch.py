"""Many prompts at once, with different parameters: `python examples/batch.py [MODEL]`.

The engine computes them together and returns the outputs in the order of the prompts. For files of
millions of rows there is `nanovllm batch`, which can be stopped and resumed: docs/batch.md.
"""

import sys
import time

from nanovllm import LLM, SamplingParams, demo_model

TERMS = [
    "paged attention",
    "a KV cache",
    "chunked prefill",
    "a block table",
    "speculative decoding",
]


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model.MODEL)
    conversations = [[{"role": "user", "content": f"What is {term}?"}] for term in TERMS]
    greedy = SamplingParams(temperature=0, max_tokens=60)
    start = time.perf_counter()
    outputs = llm.chat(conversations, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    for term, output in zip(TERMS, outputs, strict=True):
        print(f"{term}: {output.text}")
    num_tokens = sum(len(output.token_ids) for output in outputs)
    print(f"{num_tokens} tokens in {seconds:.2f} s")

    # Parameters of its own for each prompt; a seed makes a sampled text the same in every batch.
    warm = SamplingParams(temperature=3.0, top_p=0.95, max_tokens=20, n=3, seed=7)
    short = SamplingParams(temperature=0, max_tokens=40, stop=[" and"])
    prompts = ["A KV cache is", "Paged attention keeps"]
    sampled, stopped = llm.generate(prompts, [warm, short], use_tqdm=False)
    for completion in sampled.outputs:
        print(f"{completion.index}: {completion.text!r}")
    print(f"{stopped.text!r} ended by {stopped.outputs[0].finish_reason}")
    llm.shutdown()


if __name__ == "__main__":
    main()
