"""Runs a job with one of the engines below, in the Python that has it; nanovllm is not needed.

`program.py ENGINE` reads a job in JSON from standard input: `model`, `options` of the engine,
`requests` (prompt, sampling parameters), and `ways`, each a name with calls (lists of indices of
requests). It writes a line of JSON with `engine`, its name and version, and then one for each
way: `way`, `answers` (index, [tokens, log-probabilities, those of the prompt]), `counts` of what
happened in the engine so far, and `seconds`.

An engine computes the requests of a call with `generate`. Those that cannot draw with seeds take
the likeliest token. `counts` has only what its ways are about.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence as Seq
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class VLLM:
    """A model in vLLM; `options` are its engine's arguments."""

    def __init__(self, model: str, **options: Any) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
        import vllm

        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(model, **options)

    def generate(self, requests: Seq[Any]) -> list[Any]:
        """Return the tokens and log-probabilities of each request of one call."""
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [self._params(**params) for _, params in requests]
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


class Transformers:
    """A model in transformers, whose `generate` pads on the left.

    Args:
        num_threads: None is torch's number.
        more: further arguments of `generate`.
    """

    def __init__(self, model: str, num_threads: int | None = None, **more: Any) -> None:
        import torch
        import transformers

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._more = more

    def generate(self, requests: Seq[Any]) -> list[Any]:
        """Return the tokens and log-probabilities of each request of one batch."""
        import torch

        width = max(len(prompt) for prompt, _ in requests)
        longest = max(params["max_tokens"] for _, params in requests)
        pads = [width - len(prompt) for prompt, _ in requests]
        ids = [[0] * pad + prompt for pad, (prompt, _) in zip(pads, requests, strict=True)]
        done = self._model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **self._more,
        )
        found = []
        for row, (_, params) in enumerate(requests):
            tokens = done.sequences[row, width : width + params["max_tokens"]].tolist()
            at_tokens = []
            for logits, token in zip(done.logits, tokens, strict=False):
                at_tokens.append([[token, float(logits[row].double().log_softmax(-1)[token])]])
            found.append([tokens, at_tokens, []])
        return found

    def counts(self) -> dict[str, int]:
        """Return nothing."""
        return {}


class LlamaCpp:
    """A GGUF file in llama.cpp, through its C API. Each step decodes all sequences of a call.

    Args:
        num_seqs: most sequences of a call.
        longest: most tokens of a sequence.
        chunk: tokens of a prompt that are decoded at once.
        again: whether each prompt's KV is computed once before, and all but its last token taken
            from there.
        num_threads: None is one a processor.
    """

    def __init__(
        self,
        model: str,
        num_seqs: int,
        longest: int,
        chunk: int = 512,
        again: bool = False,
        num_threads: int | None = None,
    ) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._chunk = chunk
        self._again = again
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        loaded = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot read {model}")
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_seqs * longest, num_seqs
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = num_threads or os.cpu_count() or 1
        self._context = llama_cpp.llama_init_from_model(loaded, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def generate(self, requests: Seq[Any]) -> list[Any]:
        """Return the tokens and log-probabilities of each request of one batch."""
        self._lib.llama_memory_clear(self._memory, True)
        found: list[Any] = [[[], [], []] for _ in requests]
        for row, (prompt, _) in enumerate(requests):
            self._prefill(row, prompt, 0)
            if self._again:
                self._lib.llama_memory_seq_rm(self._memory, row, len(prompt) - 1, -1)
                self._prefill(row, prompt, len(prompt) - 1)
            self._choose(found[row], -1)
        lengths = [params["max_tokens"] for _, params in requests]
        while rows := [row for row, most in enumerate(lengths) if len(found[row][0]) < most]:
            entries = []
            for row in rows:
                known = found[row][0]
                entries.append((known[-1], len(requests[row][0]) + len(known) - 1, row, True))
            self._decode(entries)
            for index, row in enumerate(rows):
                self._choose(found[row], index)
        return found

    def counts(self) -> dict[str, int]:
        """Return nothing."""
        return {}

    def _prefill(self, row: int, prompt: Seq[int], first: int) -> None:
        for start in range(first, len(prompt), self._chunk):
            part = prompt[start : start + self._chunk]
            last = len(prompt) - 1
            self._decode([(token, at, row, at == last) for at, token in enumerate(part, start)])

    def _decode(self, entries: Seq[tuple[int, int, int, bool]]) -> None:
        """Decode tokens, each with its position, its sequence, and whether it wants logits."""
        batch = self._batch
        for index, (token, position, row, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = wanted
        batch.n_tokens = len(entries)
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")

    def _choose(self, found: Any, index: int) -> None:
        """Add the likeliest token after entry `index` of the last decoded batch."""
        import numpy as np

        pointer = self._lib.llama_get_logits_ith(self._context, index)
        logits = np.ctypeslib.as_array(pointer, shape=(self._num_vocab,)).astype(np.float64)
        token = int(logits.argmax())
        total = np.exp(logits - logits[token]).sum()
        found[0].append(token)
        found[1].append([[token, float(-np.log(total))]])


ENGINES: dict[str, tuple[type, tuple[str, ...]]] = {
    "vllm": (VLLM, ("vllm", "vllm-cpu")),
    "transformers": (Transformers, ("transformers",)),
    "llamacpp": (LlamaCpp, ("llama-cpp-python",)),
}
"""By name: the engine, and the packages that may have it."""


def installed(packages: Seq[str]) -> str:
    """Return the first of the packages that is installed, with its version; "" if none is."""
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            return f"{package} {version(package)}"
    return ""


def main() -> None:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    make, packages = ENGINES[sys.argv[1]]
    out.write(json.dumps({"engine": installed(packages)}) + "\n")
    engine = make(job["model"], **job["options"])
    for name, calls in job["ways"]:
        start = time.monotonic()
        answers: list[Any] = []
        for call in calls:
            found = engine.generate([job["requests"][index] for index in call])
            answers += zip(call, found, strict=True)
        line = {"way": name, "answers": answers, "counts": engine.counts()}
        line["seconds"] = time.monotonic() - start
        out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
