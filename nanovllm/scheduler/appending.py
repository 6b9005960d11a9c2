"""Appends tokens to sequences: up to the one that ends a sequence, and those that a grammar forces.

Forced tokens are known tokens like those of a prompt. The workers' tables get them with the next
step, which computes them as one chunk. Knows no blocks and no steps.
"""

from collections.abc import Iterable, Mapping

from nanovllm.scheduler.messages import NewTokens, Row
from nanovllm.scheduler.sequence import Sequence


def append_tokens(seq: Sequence, tokens: list[int], eos_token_ids: frozenset[int]) -> int:
    """Append tokens up to the first that finishes the sequence; return how many."""
    for num_appended, token in enumerate(tokens, start=1):
        seq.token_ids.append(token)
        if token in seq.stop_token_ids and seq.num_output_tokens >= seq.params.min_tokens:
            seq.finish_reason = "stop"
            is_eos = token in eos_token_ids and not seq.params.ignore_eos
            seq.stop_reason = None if is_eos else token
        elif len(seq.token_ids) >= seq.max_num_tokens:
            seq.finish_reason = "length"
        else:
            continue
        return num_appended
    return len(tokens)


def append_forced(seq: Sequence, tokens: list[int], eos_token_ids: frozenset[int]) -> int:
    """Append tokens that no step has sampled, unless the sequence is finished; return how many."""
    if seq.is_finished:
        return 0
    num_appended = append_tokens(seq, tokens, eos_token_ids)
    if seq.table_idx is not None:  # else its next admission brings all tokens
        seq.num_unsent_tokens += num_appended
    return num_appended


def send_tokens(rows: Iterable[Row], sequences: Mapping[int, Sequence]) -> list[NewTokens]:
    """Return the tokens that the table rows of `rows` lack.

    Args:
        sequences: by id.
    """
    found: list[NewTokens] = []
    for row in rows:
        seq = sequences[row.seq_id]
        if seq.num_unsent_tokens:
            start = len(seq.token_ids) - seq.num_unsent_tokens
            found.append(NewTokens(row.table_idx, start, seq.token_ids[start:]))
            seq.num_unsent_tokens = 0
    return found
