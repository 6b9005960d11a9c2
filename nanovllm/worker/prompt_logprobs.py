"""Log-probabilities of prompt tokens, for the rows whose request wants them. Knows no sampling."""

import torch

from nanovllm.scheduler.messages import Row
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.network import Network
from nanovllm.worker.sampling_rows import gather_logprobs
from nanovllm.worker.step_output import PromptLogprobs

_LOGPROB_ROWS = 256
"""Prompt positions whose logits are in memory at the same time."""


def needs_all_hidden(tables: DeviceTables, rows: list[Row]) -> bool:
    """Return whether a step of `rows` needs the hidden states of all its tokens."""
    return any(tables.params[row.table_idx].prompt_logprobs is not None for row in rows)


def gather_prompt_logprobs(
    network: Network, tables: DeviceTables, rows: list[Row], hidden: torch.Tensor
) -> list[PromptLogprobs]:
    """Return the log-probabilities of the prompt tokens of `rows`; none except on rank 0.

    The hidden state of one token gives the log-probabilities of the next.

    Args:
        hidden: of all tokens, if `needs_all_hidden` says so.
    """
    found = []
    offset = 0
    for row in rows:
        count = tables.params[row.table_idx].prompt_logprobs
        if count is not None:
            first, last = row.num_computed_tokens + 1, tables.num_prompt_tokens[row.table_idx]
            stop = min(first + row.num_scheduled_tokens, last)
            for start in range(first, stop, _LOGPROB_ROWS):
                end = min(start + _LOGPROB_ROWS, stop)
                states = hidden[offset + start - first : offset + end - first]
                logits = network.model.compute_logits(states)  # type: ignore[operator]
                if logits is not None:
                    tokens = tables.token_ids[row.table_idx, start:end].long()
                    gathered = gather_logprobs(logits, tokens, count)
                    found.append(PromptLogprobs(row.seq_id, start, count, gathered))
        offset += row.num_scheduled_tokens
    return found
