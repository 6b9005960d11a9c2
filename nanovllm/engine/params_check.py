"""Which parameters of a request an engine supports. Knows no prompt and compiles no grammar."""

import dataclasses

from nanovllm.engine.prompt import check_unicode
from nanovllm.errors import InvalidRequestError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import as_class, check_int, shown


def check_names(request_id: str | None, user: str | None) -> None:
    """Check the names that a caller gives to a request and to its user.

    Raises:
        InvalidRequestError: one is no string.
    """
    if not (user is None or isinstance(user, str)):
        raise InvalidRequestError(f"user must be a string or None, got {shown(user)}")
    if not (request_id is None or isinstance(request_id, str)):
        raise InvalidRequestError(
            f"request_id must be a string, got {shown(request_id)} ({type(request_id).__name__})"
        )


def check_priority(priority: int | None) -> int:
    """Return a request's priority; None is 0.

    Raises:
        InvalidRequestError: it is no integer of 32 bits.
    """
    priority = 0 if priority is None else priority
    return check_int(InvalidRequestError, "priority", priority, -(2**31), 2**31)


def no_adapters(lora_request: object) -> None:
    """Raise InvalidRequestError if a request names an adapter: the engine takes none."""
    if lora_request is not None:
        raise InvalidRequestError(
            f"lora_request={shown(lora_request)} needs an engine that takes adapters: make it with "
            "enable_lora=True"
        )


@dataclasses.dataclass
class ParamsCheck:
    """Checks sampling parameters against the model and the options of an engine."""

    has_tokenizer: bool
    """Whether the engine knows text."""
    vocab_size: int
    max_logprobs: int = -1
    """Most log-probabilities for each token; -1 is the size of the vocabulary."""
    in_process: bool = True
    """Whether the model runs in this process, and can call logits processors."""

    def check(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the size of the vocabulary for a logprobs of -1.

        Raises:
            InvalidRequestError: this checkpoint or engine does not support a parameter.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                "sampling_params must be SamplingParams, "
                f"got {type(params).__name__} {shown(params)}"
            )
        params = as_class(params, SamplingParams)  # the ranks may not know another
        if params.stop and not self.has_tokenizer:
            raise InvalidRequestError(
                "this engine has no tokenizer, so stop cannot be used; use stop_token_ids"
            )
        if params.logits_processors and not self.in_process:
            raise InvalidRequestError(
                "logits_processors run in this process, so tensor_parallel_size must be 1, "
                "without Ray; use logit_bias, allowed_token_ids or bad_words"
            )
        for stop in params.stop:
            check_unicode("a stop string", stop)
        if not self.has_tokenizer and params.structured_outputs is not None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so structured_outputs cannot be used"
            )
        last = self.vocab_size - 1
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", [token for token, _ in params.logit_bias]),
        ):
            if max(token_ids, default=0) > last:
                raise InvalidRequestError(
                    f"{name} holds token {max(token_ids)}; this model's last is {last}"
                )
        return self._bound_logprobs(params)

    def _bound_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the size of the vocabulary for a logprobs of -1.

        Raises:
            InvalidRequestError: more are requested than max_logprobs.
        """
        limit = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(params, name)
            count = self.vocab_size if given == -1 else given
            if count is not None and count > limit:
                raise InvalidRequestError(
                    f"{name} {given} asks for {count} of each token; this engine's max_logprobs "
                    f"is {limit}: make the LLM with a larger one, or with -1 for all"
                )
            if given == -1:
                params = params.clone(**{name: count})
        return params
