"""The demo model's questions and answers, and engine options that suit them."""

from typing import Any

from nanovllm import SamplingParams, demo_model

ENTRIES = demo_model.entries()
QUESTIONS = [question for question, _ in ENTRIES]
ANSWERS = [answer for _, answer in ENTRIES]
ANSWER_TO = dict(ENTRIES)
QUESTION = "What is paged attention?"
MULTI_BYTE = [question for question, answer in ENTRIES if max(answer) > "\u2fff"]
"""Questions whose answers hold characters of several tokens."""

GREEDY = SamplingParams(temperature=0, max_tokens=160)
"""Enough for every answer."""
SAMPLED = SamplingParams(temperature=2.0, seed=3, max_tokens=60)

OPTIONS: dict[str, Any] = {"max_model_len": 512, "num_kvcache_blocks": 2048}
TINY_POOL: dict[str, Any] = {
    "num_kvcache_blocks": 32,
    "kvcache_block_size": 8,
    "max_model_len": 256,
}
"""A KV pool so small that a batch of questions preempts."""
