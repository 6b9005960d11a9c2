"""Ask a model a few questions: `python example.py [MODEL]`.

Without MODEL, the small model that ships with nanovllm answers.
"""

import sys

from nanovllm import LLM, SamplingParams, demo_model

QUESTIONS = [
    "What is paged attention?",  # as the shipped model's glossary has it; the next three are not
    "what's a KV cache",
    "Explain chunked prefill to me.",
    "What does RoPE mean?",
    "What is the capital of Spain?",
]


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model.MODEL)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=256))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\n{question}\n  {output['text']}")


if __name__ == "__main__":
    main()
