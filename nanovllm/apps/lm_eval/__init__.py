"""Scores a model with EleutherAI's lm-evaluation-harness, the package lm_eval, in this process.

Nothing else in nanovllm imports this folder. `model` registers itself as lm_eval's model
"nanovllm" when it is imported; releases of lm_eval with plugins find it by its entry point.
"""
