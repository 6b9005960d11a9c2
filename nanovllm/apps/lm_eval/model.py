"""`--model nanovllm` of lm_eval: what its tasks ask of a model, answered by an `LLM`.

Every request of a task is handed to the engine at once; the engine makes the batches.
"""

import logging
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanovllm.apps.lm_eval.order import Scored, prefix_order
from nanovllm.chat.templates import template_options
from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.llm import LLM
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

_STEPS_APART = 2
"""After so many steps a block is surely cached: one step may be in flight when the next is made."""

Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""(the texts, or None in a rolling window; tokens of the context; tokens to score)."""


@register_model("nanovllm")
class NanoVLLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """The model of lm_eval that runs in nanovllm.

    Args:
        pretrained: `model` of `LLM`.
        max_length: most tokens that a request may see, as for lm_eval's other models. None is what
            `max_model_len` has room for.
        max_gen_toks: most tokens to generate where a task does not say.
        add_bos_token: whether texts begin with the tokenizer's beginning-of-text token; None is
            what the tokenizer does by itself.
        prefix_token_id: the token before a text without a context; None is the beginning-of-text
            token, or the end-of-text token if there is none.
        chat_template_args: further variables of the chat template.
        enable_thinking: one of them, under the name of lm_eval's other models.
        think_end_token: where the thinking of an answer ends. It and all before it is dropped, and
            a task's stop strings count only after it.
        device: as in `Config`; lm_eval's own default, "cuda:0", means "auto".
        batch_size: not used, the engine chooses; max_batch_size neither.
        options: fields of `Config`.

    Raises:
        ConfigError: an option is unknown or invalid, or the checkpoint has no tokenizer.
        CheckpointError: the model cannot be found, read or run.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if max_length is not None:
            if "max_model_len" in options:
                raise ConfigError("max_length and max_model_len both limit the context; give one")
            options["max_model_len"] = max_length + 2  # see the property max_length
        if device not in (None, "cuda:0"):
            options["device"] = device
        self.llm = LLM(pretrained, **options)
        tokenizer = self.llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{pretrained} has no tokenizer, and lm_eval's tasks are texts")
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_gen_toks = max_gen_toks
        self._name = pretrained
        end = self.eot_token_id
        self._eos: str | None = None if end is None else self.tokenizer.decode(end)
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking
        self._think_end_token = think_end_token

    @property
    def max_length(self) -> int:
        """Most tokens that a prediction may see.

        A prompt also holds the predicted token, and one token is generated.
        """
        limit: int = self.llm.engine.worker_info.max_model_len
        return limit - 2

    @property
    def eot_token_id(self) -> int | None:
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text that has no context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The model's name, for lm_eval's cache of requests."""
        return str(Path(self._name)).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            add_special_tokens: whether to add those that the tokenizer adds; None: not to a text
                that begins with one already, otherwise as `add_bos_token` says.
        """
        if add_special_tokens is None:
            prefix = self.prefix_token_id
            has_one = prefix is not None and string.startswith(self.tokenizer.decode(prefix))
            add_special_tokens = False if has_one else self._add_bos_token
        adds = True if add_special_tokens is None else add_special_tokens
        tokens: list[int] = self.tokenizer.encode(string, add_special_tokens=adds)
        return tokens

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text; without add_generation_prompt its last message goes on.

        Where the template refuses a system message, the conversation goes without it.
        """
        given = add_generation_prompt, not add_generation_prompt, None, None
        options = template_options(*given, self._template_args)
        render = self.llm.engine.input_processor.chat.render
        try:
            return render(chat_history, options)
        except InvalidRequestError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            logger.warning("the system message is left out: %s", error)
            return render(others, options)

    def loglikelihood_rolling(self, requests: Seq[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, each token seen with the most context."""
        windows: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += found
            owners += [owner] * len(found)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (logprob, _) in zip(owners, scores, strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Seq[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy sampling gives these tokens) of each pair."""
        texts = [self._fitted(context, tokens) for _, context, tokens in requests]
        lag = _STEPS_APART * self.llm.engine.worker_info.max_num_batched_tokens
        order = list(prefix_order(texts, lag))
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=1,
                detokenize=False,
                prompt_logprobs=0,
                prompt_logprob_start=texts[index].start - 1,
            )
            for index in order
        ]
        outputs = self._generate([texts[index].tokens for index in order], params, disable_tqdm)
        scores = [(0.0, True)] * len(texts)
        for index, output in zip(order, outputs, strict=True):
            scores[index] = _score(output, texts[index].start)
        for request, score in zip(requests, scores, strict=True):
            if request[0] is not None:  # else it is of a rolling window
                self.cache_hook.add_partial("loglikelihood", request[0], score)
        return scores

    def _fitted(self, context: list[int], tokens: list[int]) -> Scored:
        """Return what a request scores, without the first tokens of a context that is too long."""
        most = self.max_length
        if len(tokens) > most or not context:
            raise ValueError(
                f"a continuation has {len(tokens)} tokens after {len(context)} of context; it may "
                f"have {most}, after 1 of context or more: make max_length larger"
            )
        whole = context + tokens
        if len(whole) > most + 1:
            logger.warning(
                "%d tokens do not fit in max_length %d: the first ones of the context are left out",
                len(whole),
                most,
            )
            whole = whole[-(most + 1) :]
        return Scored(whole, len(whole) - len(tokens))

    def generate_until(self, requests: Seq[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that continues each context, up to the first of its stop strings."""
        prompts = []
        params = []
        stops = []
        for request in requests:
            context, kwargs = request.args
            sampling, until, max_gen_toks = self._sampling(kwargs)
            prompt, max_gen_toks = maybe_truncate(
                self.tok_encode(context), max_gen_toks, max_model_len=self.max_length
            )
            prompts.append(prompt)
            stops.append(until)
            # A thought may hold a task's stop strings.
            stop = [text for text in until if text == self._eos or not self._think_end_token]
            params.append(
                SamplingParams(
                    max_tokens=max_gen_toks, stop=stop, skip_special_tokens=False, **sampling
                )
            )
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        outputs = self._generate(
            [prompts[index] for index in order], [params[index] for index in order], disable_tqdm
        )
        answers = [""] * len(requests)
        for index, output in zip(order, outputs, strict=True):
            answers[index] = postprocess_generated_text(
                output.text, stops[index], self._think_end_token
            )
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _sampling(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], int]:
        """Return the sampling parameters, the stop strings and the most tokens that a task's
        gen_kwargs ask for.
        """
        found: dict[str, Any] = {**normalize_gen_kwargs(dict(kwargs), self.max_gen_toks)}
        until = handle_stop_sequences([text for text in found.pop("until") if text], self._eos)
        max_gen_toks = found.pop("max_gen_toks")
        if not 0 < max_gen_toks < self.max_length:
            raise ValueError(
                f"max_gen_toks {max_gen_toks} must be above 0 and below max_length, "
                f"{self.max_length}: the context needs room, too"
            )
        if not found.pop("do_sample"):
            found["temperature"] = 0.0
        return found, until, max_gen_toks

    def _generate(
        self, prompts: list[list[int]], params: list[SamplingParams], disable_tqdm: bool
    ) -> list[RequestOutput]:
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        for output in outputs:
            if output.finish_reason == "error":
                raise RuntimeError(f"a request failed: {output.outputs[0].stop_reason}")
        return outputs


def _score(output: RequestOutput, start: int) -> tuple[float, bool]:
    assert output.prompt_logprobs is not None
    scored = output.prompt_logprobs[start:]
    own = [next(iter(entries.values())) for entries in scored if entries is not None]
    return sum(entry.logprob for entry in own), all(entry.rank == 1 for entry in own)
