"""From token ids to what a user reads, and from text to prompts: the part that knows text.

A request is one prompt and n sequences; the scheduler knows the sequences alone.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler.messages import TokenLogprobs
from nanovllm.scheduler.sequence import Sequence
from nanovllm.utils.hub import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Completion:
    """One sequence's way to the user: what was read of it, and what was sent."""

    def __init__(self, index: int, seq: Sequence, detokenizer: Detokenizer | None) -> None:
        self.index = index
        self.seq = seq
        self.detokenizer = detokenizer
        self.num_tokens = 0  # output tokens read; those after a stop string never are
        self.num_sent_tokens = 0
        self.num_sent_chars = 0
        self.sent_end = False


class Request:
    """A prompt, its n completions, and when things happened to it."""

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        params: SamplingParams,
        completions: list[Completion],
        *,
        stream: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = list(completions[0].seq.token_ids)  # all its outputs share it
        self.params = params
        self.completions = completions
        self.stream = stream
        self.arrival_time = time.monotonic()
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.sent_prompt_logprobs = False
        self.unqueued = [completion.seq for completion in completions]

    @property
    def is_finished(self) -> bool:
        return all(completion.seq.is_finished for completion in self.completions)


class OutputProcessor:
    """Encodes prompts, follows requests and makes outputs.

    Without a tokenizer it serves token ids and empty texts.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self.tokenizer = tokenizer
        self._requests: dict[int, Request] = {}
        self._completions: dict[int, tuple[Request, Completion]] = {}  # by sequence
        self._decoded: dict[int, str] = {}  # single tokens, for log-probabilities

    def encode(self, prompt: str) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer, or the text is not valid Unicode.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this checkpoint has no tokenizer, so prompts must be lists of token ids, not text"
            )
        _check_unicode("the prompt", prompt)
        token_ids: list[int] = self.tokenizer.encode(prompt)
        return token_ids

    def render(self, messages: Any, **options: Any) -> list[int]:
        """Return the token ids of a conversation, by the chat template.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses the messages.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this checkpoint has no tokenizer, so there is no chat template"
            )
        is_list = isinstance(messages, Seq) and bool(messages)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError(
                f'a conversation is a list of {{"role": ..., "content": ...}}, got {messages!r:.80}'
            )
        try:
            token_ids: list[int] = self.tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=False, **options
            )
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"the chat template cannot render this: {error}") from error
        return token_ids

    def encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word as tokens, as it stands and after a space where that is as long (vLLM).

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer, or a word is not valid Unicode.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "this checkpoint has no tokenizer, so bad_words cannot be used"
                )
            _check_unicode("a word of bad_words", word)
            bare = word.lstrip() or word  # of white space alone: as it stands
            plain = tuple(self.tokenizer.encode(bare, add_special_tokens=False))
            spaced = tuple(self.tokenizer.encode(" " + bare, add_special_tokens=False))
            found += [plain] if plain else []
            if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        return tuple(found)

    def make_request(
        self,
        request_id: int,
        prompt: str | None,
        params: SamplingParams,
        sequences: list[Sequence],
        *,
        stream: bool,
    ) -> Request:
        """Return a request that is not followed yet.

        Raises:
            InvalidRequestError: stop strings without a tokenizer.
        """
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "this checkpoint has no tokenizer, so stop must be stop_token_ids"
            )
        completions = [
            Completion(index, seq, self._detokenizer(params)) for index, seq in enumerate(sequences)
        ]
        return Request(request_id, prompt, params, completions, stream=stream)

    def add(self, request: Request) -> None:
        """Begin to follow a request."""
        self._requests[request.request_id] = request
        for completion in request.completions:
            self._completions[completion.seq.seq_id] = (request, completion)

    def get(self, request_id: int) -> Request | None:
        """Return a followed request."""
        return self._requests.get(request_id)

    def request_of(self, seq_id: int) -> Request | None:
        """Return the request that a sequence belongs to."""
        found = self._completions.get(seq_id)
        return None if found is None else found[0]

    def read(self, seq: Sequence, now: float) -> tuple[Request, str | None]:
        """Take in a sequence's new tokens; return its request and the stop string that they
        complete, if any.

        Args:
            now: time.monotonic() when the tokens came.
        """
        request, completion = self._completions[seq.seq_id]
        request.first_token_time = request.first_token_time or now
        request.last_token_time = now
        params, detokenizer = request.params, completion.detokenizer
        if detokenizer is None or not (request.stream or params.stop):
            completion.num_tokens = seq.num_output_tokens
            return request, None
        while completion.num_tokens < seq.num_output_tokens:
            token = seq.token_ids[seq.num_prompt_tokens + completion.num_tokens]
            completion.num_tokens += 1
            search = completion.num_tokens >= params.min_tokens
            if self._is_hidden_stop(seq, completion.num_tokens, params):
                continue
            if detokenizer.add(token, search=search):
                return request, detokenizer.stop_string
        if seq.is_finished and detokenizer.finish(
            search=completion.num_tokens >= params.min_tokens
        ):
            return request, detokenizer.stop_string
        return request, None

    def output(self, request: Request) -> RequestOutput | None:
        """Return what there is to send of a request, if anything; forget it when it is finished.

        For a stream the news, else everything once it is finished.
        """
        finished = request.is_finished
        if finished:
            del self._requests[request.request_id]
            for completion in request.completions:
                del self._completions[completion.seq.seq_id]
        if not request.stream:
            return self._make_output(request, request.completions) if finished else None
        news = [c for c in request.completions if self._has_news(c)]
        return self._make_output(request, news) if news or finished else None

    def _make_output(self, request: Request, completions: list[Completion]) -> RequestOutput:
        first = request.completions[0].seq
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None and not request.sent_prompt_logprobs:
            request.sent_prompt_logprobs = True
            prompt_logprobs = [
                self._logprobs(found) if (found := first.prompt_logprobs.get(position)) else None
                for position in range(first.num_prompt_tokens)
            ]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._make_completion(request, completion) for completion in completions],
            finished=request.is_finished,
            num_cached_tokens=first.num_cached_tokens or 0,
            metrics=RequestMetrics(
                request.arrival_time,
                request.first_scheduled_time,
                request.first_token_time,
                request.last_token_time,
                sum(completion.num_tokens for completion in request.completions),
            ),
            prompt_logprobs=prompt_logprobs,
        )

    def _make_completion(self, request: Request, completion: Completion) -> CompletionOutput:
        seq, detokenizer, params = completion.seq, completion.detokenizer, request.params
        tokens = seq.output_token_ids[: completion.num_tokens]
        text, stop_string = "", None
        if detokenizer is not None:
            if not (request.stream or params.stop):
                hidden = self._is_hidden_stop(seq, len(tokens), params)
                detokenizer.add_all(tokens[: len(tokens) - hidden])
            if seq.is_finished:
                detokenizer.finish(search=False)
            end = detokenizer.safe_length(finished=seq.is_finished)
            text = detokenizer.text[completion.num_sent_chars : end]
            completion.num_sent_chars = max(end, completion.num_sent_chars)
            stop_string = detokenizer.stop_string
        logprobs, cumulative = None, None
        if params.logprobs is not None:
            known = seq.logprobs[: completion.num_tokens]
            cumulative = sum(found.logprobs[0] for found in known)
            logprobs = [self._logprobs(found) for found in known[completion.num_sent_tokens :]]
        start, completion.num_sent_tokens = completion.num_sent_tokens, len(tokens)
        completion.sent_end = seq.is_finished
        return CompletionOutput(
            index=completion.index,
            text=text,
            token_ids=tokens[start:],
            finish_reason="stop" if stop_string else seq.finish_reason,
            stop_reason=stop_string or seq.stop_reason,
            cumulative_logprob=cumulative,
            logprobs=logprobs,
        )

    def _has_news(self, completion: Completion) -> bool:
        """Whether it has tokens or an end not sent. Tokens without text yet are sent as well."""
        ended = completion.seq.is_finished and not completion.sent_end
        return ended or completion.num_tokens > completion.num_sent_tokens

    def _is_hidden_stop(self, seq: Sequence, num_tokens: int, params: SamplingParams) -> bool:
        """Whether the last of the first `num_tokens` output tokens is a stop token to leave out."""
        return (
            seq.finish_reason == "stop"
            and not isinstance(seq.stop_reason, str)
            and num_tokens == seq.num_output_tokens
            and not params.include_stop_str_in_output
        )

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer.backend_tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
        )

    def _logprobs(self, found: TokenLogprobs) -> dict[int, Logprob]:
        ranks = [found.rank, *range(1, len(found.token_ids))]
        entries: dict[int, Logprob] = {}
        for token, logprob, rank in zip(found.token_ids, found.logprobs, ranks, strict=True):
            entries.setdefault(token, Logprob(logprob, rank, self._decode_token(token)))
        return entries

    def _decode_token(self, token_id: int) -> str:
        if self.tokenizer is None:
            return ""
        if token_id not in self._decoded:
            decode = self.tokenizer.backend_tokenizer.decode
            self._decoded[token_id] = decode([token_id], skip_special_tokens=False)
        return self._decoded[token_id]


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not valid Unicode text: {error}") from error


def load_tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase | None":
    """Return the checkpoint's tokenizer, None if it has none; no code of the checkpoint is run.

    Raises:
        CheckpointError: its files cannot be read, or it is not one of the tokenizers library's.
    """
    if not checkpoint.has_tokenizer:
        logger.warning("%s has no tokenizer: prompts must be token ids", checkpoint.path)
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many kinds for a broken file
        raise CheckpointError(f"cannot load the tokenizer in {checkpoint.path}: {error}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"the tokenizer in {checkpoint.path} has no tokenizer.json; save it as a fast tokenizer"
        )
    found: PreTrainedTokenizerBase = tokenizer
    return found
