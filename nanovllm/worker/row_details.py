"""The results of a step's rows where some have more than one token, or more than tokens: drafts to
verify, failed samples, tokens that a grammar forces, log-probabilities.

Knows no device: the outputs are on the host.
"""

from collections.abc import Mapping

from nanovllm.layers.logits_rules import RULED_OUT
from nanovllm.layers.sampler import NO_TOKEN
from nanovllm.options.sampling_params import REQUESTS_FAULT
from nanovllm.scheduler.messages import Ending, Row, RowDetails
from nanovllm.worker.extensions import ForcedTokens
from nanovllm.worker.logprobs import Logprobs, by_sequence

NO_DISTRIBUTION = Ending(
    "error",
    "no token can be chosen: the logits have NaN or inf, or all are -inf; check the model's "
    "weights and dtype",
    doubts_kv=True,
)
"""Of a row whose token is NO_TOKEN."""
NO_CHOICE = Ending(
    "error",
    f"{REQUESTS_FAULT} (bad_words, min_tokens, structured_outputs, ...) "
    "forbid every token, or make logits NaN or inf; change them",
)
"""Of a row whose token is RULED_OUT."""
_ENDINGS = {NO_TOKEN: NO_DISTRIBUTION, RULED_OUT: NO_CHOICE}


def detailed_results(
    rows: list[Row],
    sampled: list[int],
    drafts: list[int],
    endings: dict[int, Ending],
    forcing: Mapping[int, ForcedTokens],
    logprobs: list[Logprobs],
) -> tuple[list[list[int]], dict[int, RowDetails]]:
    """Return the tokens of each row, and by sequence id the details of the rows that have any.

    Args:
        sampled: [S], a token, NO_TOKEN or RULED_OUT for each sample.
        drafts: [S], the draft that the sample may confirm.
        endings, forcing, logprobs: of `StepOutput`.
    """
    of_samples, of_prompts = by_sequence(logprobs)
    token_ids: list[list[int]] = []
    details: dict[int, RowDetails] = {}
    first = 0
    for row in rows:
        tokens: list[int] = []
        ending: Ending | None = None
        forced: list[int] | None = None
        if row.samples:
            last = first + row.num_draft_tokens
            tokens, ending = _accepted(sampled, drafts, endings, first, last)
            if ending is None and row.seq_id in forcing:
                forced = forcing[row.seq_id].forced(tokens)
            first = last + 1
        token_ids.append(tokens)
        values = of_samples.get(row.seq_id), of_prompts.get(row.seq_id)
        found = RowDetails(row.num_draft_tokens, ending, forced, *values)
        if found != RowDetails():
            details[row.seq_id] = found
    return token_ids, details


def _accepted(
    sampled: list[int], drafts: list[int], endings: dict[int, Ending], first: int, last: int
) -> tuple[list[int], Ending | None]:
    """Return the tokens of a row with samples `first` to `last`, and why it has none.

    A draft is accepted if it equals the token sampled at its position. The first token that
    differs, or the one after the last draft, ends the row. A failed sample behind accepted drafts
    ends the row too; the next step meets it again, as the first sample.
    """
    tokens: list[int] = []
    for sample in range(first, last + 1):
        token = sampled[sample]
        ending = endings.get(sample, _ENDINGS.get(token))
        if ending is not None:
            return tokens, None if tokens else ending._replace(doubts_kv=token == NO_TOKEN)
        tokens.append(token)
        if sample < last and drafts[sample] != token:
            break
    return tokens, None
