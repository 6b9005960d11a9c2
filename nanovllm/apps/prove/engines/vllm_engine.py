"""Computes requests with vLLM; see __init__.py."""

import json
import os
import sys
from collections.abc import Sequence as Seq
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def main() -> None:
    """Run the job on standard input."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    from vllm import LLM

    out.write(json.dumps({"engine": f"vLLM {_version()}"}) + "\n")
    llm = LLM(job["model"], **job["options"])
    for name, calls in job["ways"]:
        answers: list[Any] = []
        llm.reset_prefix_cache()
        for call in calls:
            answers += zip(call, _generate(llm, [job["requests"][i] for i in call]), strict=True)
        out.write(json.dumps({"way": name, "answers": answers}) + "\n")


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{version(package)} ({package})"
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _generate(llm: Any, requests: Seq[Any]) -> list[Any]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [SamplingParams(**params) for _, params in requests]
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        completion = output.outputs[0]
        at_tokens = _values(completion.logprobs or ())
        found.append([list(completion.token_ids), at_tokens, _values(output.prompt_logprobs or ())])
    return found


def _values(found: Seq[Any]) -> list[Any]:
    return [[[token, each.logprob] for token, each in (at or {}).items()] for at in found]


if __name__ == "__main__":
    main()
