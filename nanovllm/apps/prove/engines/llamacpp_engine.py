"""Computes greedy requests with llama.cpp through its C API; see __init__.py.

A call is one batch: each step decodes the next token of all its sequences together.
"""

import json
import math
import os
import sys
from collections.abc import Sequence as Seq
from typing import Any


def main() -> None:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    import llama_cpp

    name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
    out.write(json.dumps({"engine": name}) + "\n")
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(job["model"].encode(), params)
    for name, calls in job["ways"]:
        answers: list[Any] = []
        for call in calls:
            batch = Batch(model, [job["requests"][index] for index in call], job["options"])
            answers += zip(call, batch.generate(), strict=True)
        out.write(json.dumps({"way": name, "answers": answers}) + "\n")


class Batch:
    """The sequences of one call, in a context of their own.

    Args:
        options: `chunk`, the tokens of a prompt that are decoded at once; `again`, whether each
            prompt's KV is computed once before, and all but its last token taken from there;
            `num_threads`.
    """

    def __init__(self, model: Any, requests: Seq[Any], options: dict[str, Any]) -> None:
        import llama_cpp

        self._ll = llama_cpp
        self._requests = requests
        self._chunk = options.get("chunk", 512)
        self._again = options.get("again", False)
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        lengths = [len(prompt) + params["max_tokens"] + 8 for prompt, params in requests]
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = len(requests) * max(lengths), len(requests)
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = options.get("num_threads", os.cpu_count() or 1)
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def generate(self) -> list[Any]:
        """Return the tokens and log-probabilities of each request."""
        found: list[Any] = [[[], [], []] for _ in self._requests]
        for row, (prompt, _) in enumerate(self._requests):
            self._prefill(row, prompt, 0)
            if self._again:
                memory = self._ll.llama_get_memory(self._context)
                self._ll.llama_memory_seq_rm(memory, row, len(prompt) - 1, -1)
                self._prefill(row, prompt, len(prompt) - 1)
            self._choose(found[row], -1)
        while True:
            rows = [
                row
                for row, (_, params) in enumerate(self._requests)
                if len(found[row][0]) < params["max_tokens"]
            ]
            if not rows:
                break
            tokens = [found[row][0] for row in rows]
            starts = [len(self._requests[row][0]) for row in rows]
            self._decode(
                [
                    (known[-1], start + len(known) - 1, row, True)
                    for row, known, start in zip(rows, tokens, starts, strict=True)
                ]
            )
            for index, row in enumerate(rows):
                self._choose(found[row], index)
        self._ll.llama_batch_free(self._batch)
        self._ll.llama_free(self._context)
        return found

    def _prefill(self, row: int, prompt: Seq[int], first: int) -> None:
        for start in range(first, len(prompt), self._chunk):
            part = prompt[start : start + self._chunk]
            last = len(prompt) - 1
            places = range(start, start + len(part))
            self._decode([(t, at, row, at == last) for t, at in zip(part, places, strict=True)])

    def _decode(self, entries: Seq[tuple[int, int, int, bool]]) -> None:
        """Decode tokens, each with its position, its sequence, and whether it wants logits."""
        batch = self._batch
        for index, (token, position, row, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = wanted
        batch.n_tokens = len(entries)
        if status := self._ll.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")

    def _choose(self, found: Any, index: int) -> None:
        """Add the likeliest token after entry `index` of the last decoded batch."""
        pointer = self._ll.llama_get_logits_ith(self._context, index)
        logits = pointer[: self._num_vocab]
        top = max(logits)
        token = logits.index(top)
        total = math.fsum(math.exp(value - top) for value in logits)
        found[0].append(token)
        found[1].append([[token, -math.log(total)]])


if __name__ == "__main__":
    main()
