"""Changes one row of logits before sampling, by the rules of its request.

Rules apply in vLLM's order: logits processors, rules of plugins, allowed tokens, bad words,
min_tokens, bias, penalties. No code here waits for the GPU, except to give a logits processor its
tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu.library import torch_on_one_thread
from nanovllm.options.plugins import load_class
from nanovllm.options.sampling_params import SamplingParams, takes_prompt
from nanovllm.options.validation import shown

_ANY = -1  # in place of a token: matches every token
_NONE = -2  # in place of a token: matches none


class LogitsRule(ABC):
    """A rule of the user's for the requests whose `extra_args` have its `name`.

    Args:
        value: the request's, as `check` returned it.
        num_prompt_tokens: where the prompt ends.
        device: where the logits are.
    """

    name: ClassVar[str]  # the key in `SamplingParams.extra_args`, over HTTP in vllm_xargs

    @abstractmethod
    def __init__(self, value: Any, num_prompt_tokens: int, device: torch.device) -> None: ...

    @classmethod
    def check(cls, value: Any) -> Any:
        """Return a request's value as the rule takes it. Called in the engine's process.

        Raises:
            ValueError: a request cannot have it; the message says the rule. The request is refused.
        """
        return value

    @abstractmethod
    def apply(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Change `logits` [vocab_size] float32 in place. What it does must depend on its arguments
        alone: a step with drafts asks for several positions, and a request that was preempted gets
        a new rule. If it raises, its request ends with an error.

        Args:
            tokens: [n] int64, the request's prompt and its output so far.
        """


def load_rules(values: Sequence[str]) -> dict[str, type[LogitsRule]]:
    """Return the classes of the option logits_rules, by the names of the rules.

    Raises:
        ConfigError: a class cannot be loaded, or two have one name.
    """
    rules: dict[str, type[LogitsRule]] = {}
    arguments = ("value", "num_prompt_tokens", "device")
    for value in values:
        rule = load_class("logits_rules", value, LogitsRule, arguments)  # type: ignore[type-abstract]
        name = getattr(rule, "name", None)
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f'logits_rules: "{value}" must have a name, which requests give in extra_args, '
                f"such as name = 'no_digits', got {shown(name)}"
            )
        if name in rules:
            raise ConfigError(f'logits_rules: "{value}" has the name {name} of another: change it')
        rules[name] = rule
    return rules


class LogitsRules:
    """The rules of one request.

    Args:
        own: the classes of `load_rules`.
        bad_words: `params.bad_words` as token ids.
        stop_token_ids: tokens that are forbidden before `params.min_tokens`.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        bad_words: tuple[tuple[int, ...], ...],
        stop_token_ids: frozenset[int],
        device: torch.device,
        own: Mapping[str, type[LogitsRule]] = MappingProxyType({}),
    ) -> None:
        def tensor(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._allowed = None
        if params.allowed_token_ids is not None:
            self._allowed = tensor(params.allowed_token_ids)
        single = [word[0] for word in bad_words if len(word) == 1]
        longer = [word for word in bad_words if len(word) > 1]
        width = max(map(len, longer), default=1) - 1
        self._bad_tokens = tensor(single) if single else None
        # The tokens before each longer word's last one; _ANY fills the rows of shorter words.
        before = [[_ANY] * (width + 1 - len(word)) + list(word[:-1]) for word in longer]
        self._longer = None
        if longer:
            self._longer = tensor(before), tensor([word[-1] for word in longer])
        self._processors = [(f, takes_prompt(f)) for f in params.logits_processors]
        self._own = own
        self._made: dict[str, LogitsRule] = {}
        self.running = ""  # what of the user's runs, for errors
        self._stops = tensor(sorted(stop_token_ids)) if params.min_tokens else None
        self._biased = self._biases = None
        if params.logit_bias:
            self._biased = tensor(list(params.logit_bias))
            self._biases = tensor(list(params.logit_bias.values()), torch.float32)

    def run_processors(self, logits: torch.Tensor, tokens: torch.Tensor) -> Iterator[str]:
        """Change `logits` [vocab_size] float32 in place by the request's logits processors, then by
        its rules of plugins: yield the name of each when it has been applied.

        Args:
            tokens: [n] int64, the request's prompt and its output so far.

        Raises:
            TypeError: a processor returned no row of logits.
            Exception: whatever the user's code raises.
        """
        self.running = "a logits processor"
        if self._processors:
            self._run_functions(logits, tokens)
            yield "logits_processors"
        for name, value in (self._params.extra_args or {}).items():
            self.running = f"logits rule {name}"
            if name not in self._made:  # what its __init__ raises ends the request, too
                rule = self._own[name](value, self._num_prompt_tokens, logits.device)
                self._made[name] = rule
            self._made[name].apply(logits, tokens)
            yield name

    def _run_functions(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        output = tokens.tolist()
        prompt = output[: self._num_prompt_tokens]
        del output[: self._num_prompt_tokens]
        row: Any = logits
        for processor, with_prompt in self._processors:
            row = processor(prompt, output, row) if with_prompt else processor(output, row)
            if not torch.is_tensor(row) or row.shape != logits.shape:
                found = f"shape {list(row.shape)}" if torch.is_tensor(row) else shown(row)
                raise TypeError(f"it must return logits of shape {list(logits.shape)}, not {found}")
        logits.copy_(row)

    def apply_each(self, logits: torch.Tensor, tokens: torch.Tensor) -> Iterator[str]:
        """Change `logits` [vocab_size] float32 in place, rule by rule: yield the name of each, that
        of its parameter, when it has been applied.

        Args:
            tokens: [n] int64, the request's prompt and its output so far.
        """
        params = self._params
        output = tokens[self._num_prompt_tokens :]
        kept = None
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(-torch.inf)
            logits[self._allowed] = kept
            yield "allowed_token_ids"
        if self._bad_tokens is not None:
            logits.index_fill_(0, self._bad_tokens, -torch.inf)
        if self._longer is not None:
            self._forbid(logits, *self._longer, output)
        if self._bad_tokens is not None or self._longer is not None:
            yield "bad_words"
        if self._stops is not None and len(output) < params.min_tokens:
            # Assigning a number, `logits[self._stops] = -inf`, would wait for the GPU.
            logits.index_fill_(0, self._stops, -torch.inf)
            yield "min_tokens"
        if kept is not None:  # if every allowed token is now forbidden, allow them all again
            left = logits[self._allowed]
            logits[self._allowed] = torch.where(left.amax() == -torch.inf, kept, left)
        if self._biased is not None and self._biases is not None:
            logits.index_add_(0, self._biased, self._biases)
            yield "logit_bias"
        # A token that occurs twice is written twice, with the same number. Writing each token once
        # would need the number of distinct tokens, and the host would wait for it.
        if params.repetition_penalty != 1.0:
            scores = logits[tokens]
            penalty = params.repetition_penalty
            logits[tokens] = torch.where(scores > 0, scores / penalty, scores * penalty)
            yield "repetition_penalty"
        if params.frequency_penalty or params.presence_penalty:
            ones = torch.ones_like(output, dtype=logits.dtype)
            counts = torch.zeros_like(logits).index_add_(0, output, ones)[output]
            penalties = params.frequency_penalty * counts + params.presence_penalty
            logits[output] = logits[output] - penalties
            yield " and ".join(
                name for name in ("frequency_penalty", "presence_penalty") if getattr(params, name)
            )

    @staticmethod
    def _forbid(
        logits: torch.Tensor, before: torch.Tensor, last: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Forbid the last token of each word whose other tokens end the output.

        All words at once: a kernel or two for each word would take longer than the model.

        Args:
            before: [words, longest - 1] int64, the other tokens, at the end of each row.
            last: [words] int64.
        """
        end = output[-before.shape[1] :]
        end = F.pad(end, (before.shape[1] - len(end), 0), value=_NONE)
        matches = ((before == end) | (before == _ANY)).all(1)
        scores = logits[last].masked_fill_(matches, -torch.inf)
        logits.scatter_reduce_(0, last, scores, "amin")  # several words may end with one token


Ruled = tuple[int, LogitsRules, torch.Tensor]
"""A row's index, its rules and its tokens [n] int64, the request's prompt and its output so far."""
Tell = Callable[[int, str, torch.Tensor], None]
"""Is told a row's index, the name of a rule that has been applied to it, and the row's logits."""


def run_processors(
    logits: torch.Tensor, rows: list[Ruled], tell: Tell | None = None
) -> dict[int, str]:
    """Let the logits processors change `logits` [R, vocab_size] float32 in place.

    Returns why the processors of rows failed, by index.
    """
    errors: dict[int, str] = {}
    for index, rules, tokens in rows:
        try:
            for name in rules.run_processors(logits[index], tokens):
                if tell is not None:
                    tell(index, name, logits[index])
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {error!s:.200}"
            errors[index] = f"{rules.running} failed: {reason}"
    return errors


def apply_rules(logits: torch.Tensor, rows: list[Ruled], tell: Tell | None = None) -> None:
    """Apply the rules that come after the processors to `logits` [R, vocab_size] float32."""
    with torch_on_one_thread():  # a row takes microseconds
        for index, rules, tokens in rows:
            for name in rules.apply_each(logits[index], tokens):
                if tell is not None:
                    tell(index, name, logits[index])
