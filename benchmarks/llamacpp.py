"""llama.cpp as an engine of bench.py, through its C API in the package llama-cpp-python.

All prompts are computed first, in batches of 2048 tokens, then one token of each sequence a step.
Runs in an environment that has llama-cpp-python; nanovllm is not needed there.
"""

import itertools
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import llama_cpp as lib
import numpy as np

BATCH_SIZE = 2048
"""Tokens of a batch."""


class Token(NamedTuple):
    """A token of a batch."""

    token_id: int
    position: int
    seq: int
    samples: bool
    """Whether the token that follows is wanted."""


class LlamaCpp:
    """A model, and the context of the last requests, whose prompts it keeps: as llama.cpp's server
    does, it computes of a prompt what does not begin the last one of the same sequence.

    Args:
        model: a GGUF file.
        options: fields of llama.cpp's context parameters.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            model.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"llama.cpp cannot read {model}: name a GGUF file")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._options = options
        self._batch = lib.llama_batch_init(BATCH_SIZE, 0, 1)
        self._context: Any = None
        self._sizes = (0, 0)  # sequences and tokens of the context
        self._computed: list[list[int]] = []  # prompts whose keys and values the context has

    def run(
        self, prompts: list[list[int]], output_lens: list[int], sampling: Mapping[str, Any]
    ) -> None:
        """Compute `output_lens[i]` tokens after `prompts[i]`; they are discarded."""
        kept = self._prepare(prompts, output_lens)
        sampler = make_sampler(sampling) if sampling["temperature"] > 0 else None
        tokens = [
            Token(token_id, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
            if position >= kept[seq]
        ]
        last: dict[int, int] = {}
        for start in range(0, len(tokens), BATCH_SIZE):
            last |= self._compute(tokens[start : start + BATCH_SIZE], sampler)
        for step in range(1, max(output_lens)):
            last = self._compute(
                [
                    Token(token_id, len(prompts[seq]) + step - 1, seq, True)
                    for seq, token_id in last.items()
                    if step < output_lens[seq]
                ],
                sampler,
            )
        if sampler is not None:
            lib.llama_sampler_free(sampler)

    def _prepare(self, prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        """Return how many tokens of each prompt the context keeps; create one if it is too small,
        or for another number of sequences.
        """
        lengths = [len(prompt) + count for prompt, count in zip(prompts, output_lens, strict=True)]
        sizes = len(prompts), -(-max(lengths) // 256) * 256
        if sizes[0] != self._sizes[0] or sizes[1] > self._sizes[1]:
            if self._context is not None:
                lib.llama_free(self._context)
            params = lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max = sizes[0] * sizes[1], sizes[0]
            params.n_batch = BATCH_SIZE
            cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
            num_threads = len(cores) if cores else os.cpu_count()
            params.n_threads = params.n_threads_batch = num_threads
            for name, value in self._options.items():
                setattr(params, name, value)
            self._context, self._sizes = lib.llama_init_from_model(self._model, params), sizes
            if not self._context:
                sys.exit("llama.cpp has no memory for these requests")
            self._computed = [[] for _ in prompts]
        kept = [
            min(len(prompt) - 1, shared_prefix(prompt, last))
            for prompt, last in zip(prompts, self._computed, strict=True)
        ]
        for seq, length in enumerate(kept):
            if not lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), seq, length, -1):
                sys.exit("llama.cpp cannot cut a sequence of this model")
        self._computed = prompts
        return kept

    def _compute(self, tokens: list[Token], sampler: Any) -> dict[int, int]:
        """Compute a batch; return the tokens that follow, by sequence."""
        batch = self._batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token.token_id, token.position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, token.seq
            batch.logits[i] = token.samples
        batch.n_tokens = len(tokens)
        if lib.llama_decode(self._context, batch) != 0:
            sys.exit("llama_decode failed")
        return {
            token.seq: self._sample(i, sampler) for i, token in enumerate(tokens) if token.samples
        }

    def _sample(self, index: int, sampler: Any) -> int:
        """Return a token from the logits of the batch's token `index`: the most likely one if
        there is no sampler, because llama.cpp's greedy sampler copies the whole vocabulary.
        """
        if sampler is not None:
            return int(lib.llama_sampler_sample(sampler, self._context, index))
        logits = lib.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def shared_prefix(first: list[int], second: list[int]) -> int:
    """Return how many tokens both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in same)


def make_sampler(sampling: Mapping[str, Any]) -> Any:
    """Return llama.cpp's sampler for a temperature above 0, with top_k and top_p if given."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    if "top_k" in sampling:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(sampling["top_k"]))
    if "top_p" in sampling:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(sampling["top_p"], 1))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(sampling["temperature"]))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(0))
    return chain
