"""Tokens to outputs: follows requests, decodes their tokens and builds what the user gets."""

from functools import cached_property
from typing import Any

from nanovllm.core.messages import FinishInfo, TokenLogprobs
from nanovllm.core.sequence import Sequence
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.request import Completion, Request
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import (
    CompletionOutput,
    DraftCounts,
    Logprob,
    RequestMetrics,
    RequestOutput,
    WeightVersionSpan,
)


class OutputProcessor:
    """Follows requests from `add_request` until their last output. Without a tokenizer all texts
    are empty.
    """

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.requests: dict[int | str, Request] = {}  # that are followed, by id
        self._completions: dict[int, Completion] = {}  # by sequence id
        self._token_texts: dict[int, str] = {}  # of tokens that are decoded alone
        self.weight_version: int | str = 0

    def add_request(self, request: Request) -> None:
        """Begin to follow a request."""
        self.requests[request.request_id] = request
        for index, seq in enumerate(request.sequences):
            detokenizer = self.make_detokenizer(request.params)
            self._completions[seq.seq_id] = Completion(request, index, seq, detokenizer)

    def request_of(self, seq_id: int) -> Request | None:
        """Return the request that a sequence belongs to, None if it is not followed."""
        completion = self._completions.get(seq_id)
        return None if completion is None else completion.request

    def process_tokens(self, seq: Sequence, now: float) -> tuple[Request, FinishInfo | None]:
        """Read a sequence's new tokens, which came `now`, and the rest of its text if it has ended.
        Return its request, and why its text ends the output: a stop string, or a failure.
        """
        completion = self._completions[seq.seq_id]
        request = completion.request
        detokenizer = completion.detokenizer
        num_output_tokens = seq.num_output_tokens
        if completion.num_tokens < num_output_tokens:  # an error brings no token
            request.first_token_time = request.first_token_time or now
            request.last_token_time = now
            versions = completion.weight_versions
            if not versions or versions[-1][0] != self.weight_version:
                versions.append((self.weight_version, completion.num_tokens))
        if detokenizer is None or not (request.decodes_each_step or seq.output.finish_reason):
            completion.num_tokens = num_output_tokens
            return request, None
        try:
            stop_string = _decode(completion, detokenizer, num_output_tokens)
        except BaseException as error:  # a panic of the tokenizer's library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            completion.detokenizer = None
            completion.num_tokens = num_output_tokens
            return request, FinishInfo("error", f"the tokens could not be decoded: {error!r}")
        return request, None if stop_string is None else FinishInfo("stop", stop_string)

    def make_output(self, request: Request) -> RequestOutput | None:
        """Return the output to send now, if any; stop following a request that is finished.

        A stream sends the delta since its last output. Other requests send one output at the end.
        """
        completions = [self._completions[seq.seq_id] for seq in request.sequences]
        finished = request.is_finished
        if finished:
            del self.requests[request.request_id]
            for seq in request.sequences:
                del self._completions[seq.seq_id]
        to_send = [each for each in completions if (each.has_delta if request.stream else finished)]
        if not (to_send or finished):
            return None
        counts = (seq.output.draft_counts for seq in request.sequences)
        first = request.sequences[0]
        pooled = (first.output.extras or {}).get("pooled")
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._make_completion_output(completion) for completion in to_send],
            finished=finished,
            num_cached_tokens=first.num_cached_tokens or 0,
            metrics=RequestMetrics(
                request.arrival_time,
                request.first_scheduled_time,
                request.first_token_time,
                request.last_token_time,
                sum(completion.num_tokens for completion in completions),
                sum(filter(None, counts), DraftCounts()),
            ),
            prompt_logprobs=self._take_prompt_logprobs(request),
            weight_version=self.weight_version,
            lora_request=request.lora_request,
            pooled=pooled[-1][1] if pooled else None,
        )

    def _make_completion_output(self, completion: Completion) -> CompletionOutput:
        """Return what was read of a completion and not sent yet, and mark it as sent."""
        seq = completion.seq
        detokenizer = completion.detokenizer
        request = completion.request
        num_sent = 0 if request.sends_all else completion.num_sent_tokens
        first = seq.num_prompt_tokens
        tokens = seq.token_ids[first + num_sent : first + completion.num_tokens]
        text = ""
        if detokenizer is not None:
            end = detokenizer.safe_length(finished=seq.is_finished)
            start = 0 if request.sends_all else completion.num_sent_chars
            text = detokenizer.read(start, end)
            completion.num_sent_chars = max(end, completion.num_sent_chars)
        logprobs = None
        cumulative = None
        if request.params.logprobs is not None:
            for found in seq.output.logprobs[completion.num_sent_tokens : completion.num_tokens]:
                completion.cumulative_logprob += found.logprobs[0]
            cumulative = completion.cumulative_logprob
            known = seq.output.logprobs[num_sent : completion.num_tokens]
            with_text = request.params.detokenize
            logprobs = [self._logprobs(found, with_text=with_text) for found in known]
        completion.num_sent_tokens = completion.num_tokens
        completion.sent_end = seq.is_finished
        return CompletionOutput(
            index=completion.index,
            text=text,
            token_ids=tokens,
            finish_reason=seq.output.finish_reason,
            stop_reason=seq.output.stop_reason,
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            weight_versions=_version_spans(completion) if seq.is_finished else None,
            routed_experts=_joined_extra(seq, "routed_experts") if seq.is_finished else None,
        )

    def make_detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        """Return what makes the text of an output; None if it has none."""
        if self._tokenizer is None or not params.detokenize:
            return None
        skips = params.skip_special_tokens
        kept = params.kept_token_ids
        return Detokenizer(
            self._tokenizer.backend_tokenizer,
            skip_special_tokens=skips and not kept,
            skipped=self._special_tokens.difference(kept) if skips else frozenset(),
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            marked=frozenset(kept if params.marks_kept_tokens else ()),
        )

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        assert self._tokenizer is not None
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def _take_prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """Return the prompt's log-probabilities: once, or with each output that has all so far."""
        sent = request.sent_prompt_logprobs and not request.sends_all
        if request.params.prompt_logprobs is None or sent:
            return None
        request.sent_prompt_logprobs = True
        first = request.sequences[0]
        with_text = request.params.detokenize
        found = map(first.output.prompt_logprobs.get, range(first.num_prompt_tokens))
        return [
            None if logprobs is None else self._logprobs(logprobs, with_text=with_text)
            for logprobs in found
        ]

    def _logprobs(self, found: TokenLogprobs, *, with_text: bool) -> dict[int, Logprob]:
        """Return the log-probabilities of one position by token, the token itself first."""
        ranks = [found.rank, *range(1, len(found.token_ids))]
        entries: dict[int, Logprob] = {}
        for token, logprob, rank in zip(found.token_ids, found.logprobs, ranks, strict=True):
            text = self._token_text(token) if with_text else None
            entries.setdefault(token, Logprob(logprob, rank, text))
        return entries

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._token_texts:
            decode = self._tokenizer.backend_tokenizer.decode
            self._token_texts[token_id] = decode([token_id], skip_special_tokens=False)
        return self._token_texts[token_id]


def _joined_extra(seq: Sequence, name: str) -> Any:
    """Return the arrays of all rows, one value for each token that is computed: later ones replace
    earlier ones. None without any.
    """
    if seq.output.extras is None or name not in seq.output.extras:
        return None
    parts = seq.output.extras[name]
    num_tokens = min(len(seq.token_ids) - 1, max(start + len(ids) for start, ids in parts))
    found = parts[0][1].repeat(-(-num_tokens // len(parts[0][1])), axis=0)[:num_tokens]
    for start, ids in parts:
        found[start : start + len(ids)] = ids[: max(0, num_tokens - start)]
    return found


def _version_spans(completion: Completion) -> list[WeightVersionSpan]:
    versions = completion.weight_versions
    ends = [*(start for _, start in versions[1:]), completion.num_tokens]
    return [
        WeightVersionSpan(version, start, end)
        for (version, start), end in zip(versions, ends, strict=False)  # none: no token came
    ]


def _decode(completion: Completion, detokenizer: Detokenizer, num_output_tokens: int) -> str | None:
    """Decode what was not read of a sequence; return the stop string that it completes, if any."""
    seq = completion.seq
    params = completion.request.params
    if not completion.request.decodes_each_step:  # it has ended: all at once
        completion.num_tokens = num_output_tokens
        tokens = seq.token_ids[seq.num_prompt_tokens :]
        detokenizer.add_all(tokens[:-1] if completion.ends_with_hidden_stop else tokens)
    while completion.num_tokens < num_output_tokens:
        token = seq.token_ids[seq.num_prompt_tokens + completion.num_tokens]
        completion.num_tokens += 1
        search = completion.num_tokens >= params.min_tokens
        if not completion.ends_with_hidden_stop and detokenizer.add(token, search=search):
            return detokenizer.stop_string
    if seq.output.finish_reason is not None:
        detokenizer.finish(search=completion.num_tokens >= params.min_tokens)
    return detokenizer.stop_string
