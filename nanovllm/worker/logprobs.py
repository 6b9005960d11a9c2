"""The log-probabilities that requests want: of the tokens that a step samples, and of prompts.

The device gathers them, with each token's rank and the most likely tokens.
"""

import dataclasses
from collections.abc import Iterable, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanovllm.core.messages import Row, TokenLogprobs
from nanovllm.layers.sampler import Sampling, thresholds_of, weights_of
from nanovllm.options.sampling_params import GREEDY_BELOW
from nanovllm.platform import Platform
from nanovllm.worker.device_tables import DeviceTables

if TYPE_CHECKING:
    from nanovllm.worker.step_sampler import StepSampler

_PIECE = 2**23  # logits whose log-probabilities are in memory at the same time: 32 MiB in float32
_PROMPT_ROWS = 256  # prompt positions whose logits are in memory at the same time


class GatheredLogprobs(NamedTuple):
    """Log-probabilities of L positions, on the device or on the host."""

    token_ids: torch.Tensor  # [L, 1 + k] int64: the own token, then the k most likely tokens
    logprobs: torch.Tensor  # [L, 1 + k] float32
    ranks: torch.Tensor  # [L] int64, of the position's own token; 1 is the most likely

    def tolist(self, counts: Seq[int]) -> list[TokenLogprobs]:
        """Return Python numbers; position i gets its own token and the `counts[i]` most likely."""
        columns = (self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist())
        return [
            TokenLogprobs(tokens[: 1 + count], logprobs[: 1 + count], rank)
            for count, tokens, logprobs, rank in zip(counts, *columns, strict=True)
        ]


class Logprobs(NamedTuple):
    """Log-probabilities of L samples, or of L tokens of prompts."""

    seq_ids: list[int]  # [L]
    counts: list[int]  # [L], how many of the most likely tokens the request wants
    values: GatheredLogprobs
    positions: list[int] | None = None  # [L], of the tokens in their prompts; None: of samples

    def to_host(self, platform: Platform) -> "Logprobs":
        return self._replace(values=GatheredLogprobs(*map(platform.to_host, self.values)))


def sampled_logprobs(
    tables: DeviceTables,
    sampling: "StepSampler",
    logits: torch.Tensor,
    tokens: torch.Tensor,
    mode: str = "raw_logprobs",
) -> list[Logprobs]:
    """Return the log-probabilities of the samples whose request wants them, after `sample`. The
    logits [S, vocab_size] are the model's: no rules, no temperature. `mode` is that of `Config`.
    """
    counts = {
        index: count
        for index, params in enumerate(sampling.params)
        if (count := params.logprobs) is not None
    }
    rows = tables.platform.upload(list(counts))
    own = tokens[rows].clamp(min=0)  # a row without a token fails: its numbers do not count
    most = max(counts.values())
    normalized = mode.endswith("logprobs")
    if mode.startswith("processed"):  # few rows want it, and its filters sort them as a whole
        scores = processed_logits(sampling.ruled[rows], own, sampling.parameters().take(rows))
        gathered = gather_logprobs(scores, own, most, normalized=normalized)
    else:
        gathered = gather_logprobs(logits, own, most, rows, normalized=normalized)
    return [Logprobs([sampling.rows[i].seq_id for i in counts], list(counts.values()), gathered)]


def processed_logits(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Return vLLM's processed logits: logits / temperature, and -inf for the tokens that the row's
    filters leave out.

    A greedy row has neither temperature nor filters. A drawn token is never left out: rounding may
    put a token at the edge of top_p on either side. The logits [L, vocab_size] are those after the
    rules; the returned tensor is a new one, of float32.
    """
    scores = logits.float().clone()
    greedy = sampling.temperatures < GREEDY_BELOW
    temperatures = torch.where(greedy, 1.0, sampling.temperatures)
    sampling = dataclasses.replace(sampling, temperatures=temperatures)
    own = scores.gather(1, tokens[:, None])
    largest = scores.amax(-1)
    excluded = torch.zeros_like(scores, dtype=torch.bool)
    filtered = (sampling.top_ks < scores.shape[-1]) | (sampling.top_ps < 1) | (sampling.min_ps > 0)
    rows = (filtered & ~greedy).nonzero()[:, 0]
    if len(rows):
        excluded[rows] = _excluded(scores[rows], largest[rows], own[rows], sampling.take(rows))
    return scores.div_(temperatures[:, None]).masked_fill_(excluded, -torch.inf)


def _excluded(
    scores: torch.Tensor, largest: torch.Tensor, own: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Return which tokens top_k, top_p and min_p leave out: [R, vocab_size]."""
    weights = weights_of(scores, largest, sampling)
    total = weights.sum(-1, dtype=torch.float64)
    values = scores.sort(descending=True).values
    thresholds, _ = thresholds_of(values, largest, total, sampling)
    keeps_all = (sampling.top_ks >= scores.shape[-1]) & (sampling.top_ps >= 1)
    thresholds = thresholds.masked_fill(keeps_all, -torch.inf)
    below = (scores < thresholds[:, None]) | (weights < sampling.min_ps[:, None])
    return below & (scores != own)


def prompt_logprobs(
    tables: DeviceTables,
    rows: list[Row],
    hidden: torch.Tensor,
    model: torch.nn.Module,
    mode: str = "raw_logprobs",
) -> list[Logprobs]:
    """Return the log-probabilities of the prompt tokens of `rows`; none except on rank 0.

    The hidden state of one token gives the log-probabilities of the next. No prompt's token is
    sampled, so a processed `mode` is raw here.
    """
    wanted: list[tuple[Row, range]] = []
    indices: list[int] = []  # of the hidden states
    offset = 0
    for row in rows:
        params = tables.params[row.table_idx]
        if params.prompt_logprobs is not None:
            first = row.num_computed_tokens + 1
            stop = min(first + row.num_scheduled_tokens, tables.num_prompt_tokens[row.table_idx])
            positions = range(max(first, params.prompt_logprob_start + 1), stop)
            wanted.append((row, positions))
            indices.extend(position - first + offset for position in positions)
        offset += row.num_scheduled_tokens
    seq_ids = [row.seq_id for row, positions in wanted for _ in positions]
    tables_of = [row.table_idx for row, positions in wanted for _ in positions]
    places = [position for _, positions in wanted for position in positions]
    found = []
    for start in range(0, len(indices), _PROMPT_ROWS):
        piece = slice(start, start + _PROMPT_ROWS)
        rows_of = tables.platform.upload(indices[piece])
        logits = model.compute_logits(hidden[rows_of])  # type: ignore[operator]
        if logits is None:
            continue
        place = [tables.platform.upload(numbers[piece]) for numbers in (tables_of, places)]
        counts = [tables.params[index].prompt_logprobs or 0 for index in tables_of[piece]]
        gathered = gather_logprobs(
            logits,
            tables.token_ids[*place].long(),
            max(counts),
            normalized=mode.endswith("logprobs"),
        )
        found.append(Logprobs(seq_ids[piece], counts, gathered, places[piece]))
    return found


def by_sequence(
    parts: list[Logprobs],
) -> tuple[dict[int, list[TokenLogprobs]], dict[int, list[tuple[int, TokenLogprobs]]]]:
    """Return those of samples, and (position, log-probabilities) of prompts: by sequence id."""
    sampled: dict[int, list[TokenLogprobs]] = {}
    prompts: dict[int, list[tuple[int, TokenLogprobs]]] = {}
    for part in parts:
        values = part.values.tolist(part.counts)
        if part.positions is None:
            for seq_id, value in zip(part.seq_ids, values, strict=True):
                sampled.setdefault(seq_id, []).append(value)
            continue
        for seq_id, place, value in zip(part.seq_ids, part.positions, values, strict=True):
            prompts.setdefault(seq_id, []).append((place, value))
    return sampled, prompts


def gather_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    count: int,
    rows: torch.Tensor | None = None,
    *,
    normalized: bool = True,
) -> GatheredLogprobs:
    """Return the log-probabilities of `tokens` [L] and of the `count` most likely tokens.

    The rows are processed in pieces, so the memory does not grow with their number.

    Args:
        logits: [L, vocab_size].
        rows: [L] int64, which rows of `logits` to use instead.
        normalized: False: the logits themselves.
    """
    size = max(_PIECE // logits.shape[-1], 1)
    pieces: Iterable[torch.Tensor]
    if rows is None:
        pieces = torch.split(logits, size)
    else:
        pieces = (logits[piece] for piece in torch.split(rows, size))
    gathered = [
        _gather_piece(piece, own, count, normalized=normalized)
        for piece, own in zip(pieces, torch.split(tokens, size), strict=True)
    ]
    return GatheredLogprobs(*map(torch.cat, zip(*gathered, strict=True)))


def _gather_piece(
    logits: torch.Tensor, tokens: torch.Tensor, count: int, *, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the columns of `GatheredLogprobs`."""
    logprobs = logits.float()
    if normalized:
        logprobs = logprobs.log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    # Not in int64: torch converts the mask to the dtype of the sum.
    ranks = (logprobs > own).sum(-1, dtype=torch.int32).long() + 1
    values, ids = _most_likely(logprobs, min(count, logits.shape[-1]))
    return torch.cat([tokens[:, None], ids], 1), torch.cat([own, values], 1), ranks


def _most_likely(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest of each row, and their ids; of equal ones the lowest ids first.

    Which of equal ones torch's topk takes depends on `count`, which is that of the whole batch.
    """
    if not count:
        return logprobs[:, :0], logprobs.new_empty((len(logprobs), 0), dtype=torch.long)
    if logprobs.is_cpu:
        ids = _largest_by_row(logprobs, count)
    else:
        ids = torch.cat([_largest_by_key(part, count) for part in logprobs.chunk(4)])
    return logprobs.gather(1, ids), ids


def _largest_by_row(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """Return ids as `_most_likely` does. Rows with equal numbers at the end are looked at again."""
    values, ids = logprobs.topk(count)
    candidates = (logprobs >= values[:, -1:]).sum(-1, dtype=torch.int32)
    for row in (candidates > count).nonzero()[:, 0]:
        found = (logprobs[row] >= values[row, -1]).nonzero()[:, 0]
        ordered = logprobs[row, found].sort(descending=True, stable=True)
        ids[row] = found[ordered.indices[:count]]
    ids = ids.sort(-1).values
    return ids.gather(1, logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)


def _largest_by_key(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """Return the same without waiting for a GPU. A CPU takes twice the time of `_largest_by_row`.

    topk gets integers that are all different: a number's bits, in the order of the numbers, and the
    id below them.
    """
    bits = logprobs.add(0.0).view(torch.int32)  # -0.0 becomes 0.0, which equals it
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    keys = bits.long().mul_(2**32).sub_(ids)
    return -keys.topk(count).values & 0xFFFFFFFF
