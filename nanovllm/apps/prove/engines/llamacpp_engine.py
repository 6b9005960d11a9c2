"""Computes greedy requests with llama.cpp through its C API; see __init__.py.

A call is one batch: each step decodes the next token of all its sequences together.
"""

import os
from collections.abc import Sequence as Seq
from typing import Any

import llama_cpp
import numpy as np


def version() -> str:
    """Return the engine's name and version."""
    return f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"


class LlamaCppPeer:
    """A model and a context, which all calls share.

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
        llama_cpp.llama_memory_clear(self._memory, True)
        found: list[Any] = [[[], [], []] for _ in requests]
        for row, (prompt, _) in enumerate(requests):
            self._prefill(row, prompt, 0)
            if self._again:
                llama_cpp.llama_memory_seq_rm(self._memory, row, len(prompt) - 1, -1)
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
        """Return nothing: the engine counts nothing that a way is about."""
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
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")

    def _choose(self, found: Any, index: int) -> None:
        """Add the likeliest token after entry `index` of the last decoded batch."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        logits = np.ctypeslib.as_array(pointer, shape=(self._num_vocab,)).astype(np.float64)
        token = int(logits.argmax())
        total = np.exp(logits - logits[token]).sum()
        found[0].append(token)
        found[1].append([[token, float(-np.log(total))]])


Engine = LlamaCppPeer
