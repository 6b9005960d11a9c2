"""lm_eval's tasks on a model in this process: `--model nanovllm` for lm-evaluation-harness.

docs/evaluation.md says how to run it, and how to evaluate a server instead.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanovllm import LLM, SamplingParams

CONTEXTS_AT_ONCE = 64
"""After so many contexts come their other choices, which find them in the prefix cache."""
SCORING = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
Pair = tuple[Any, list[int], list[int]]
"""(the texts, None in a rolling window; tokens of the context; tokens to score)."""


@register_model("nanovllm")
class NanoVLLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    def __init__(self, pretrained: str, max_gen_toks: int = 256, **options: Any) -> None:
        super().__init__()
        if options.get("device") in (None, "cuda:0"):  # what lm_eval says by default
            options["device"] = "auto"
        ours = options.keys() - {"batch_size", "max_batch_size"}  # the engine makes the batches
        self.llm = LLM(pretrained, **{name: options[name] for name in ours})
        self.tokenizer: Any = self.llm.get_tokenizer()
        self._name = pretrained
        self.max_gen_toks = max_gen_toks
        # A prompt also holds the predicted token, and one token is generated.
        self.max_length: int = self.llm.engine.worker_info.max_model_len - 2

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Any:
        has_one = string.startswith(self.tokenizer.decode(self.prefix_token_id))
        adds = not has_one if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string, add_special_tokens=adds)

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> Any:
        ends = "add_generation_prompt" if add_generation_prompt else "continue_final_message"
        return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **{ends: True})

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Return the log-likelihood of each text, each token seen with the most context."""
        totals = []
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pairs, True)))
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy sampling gives these tokens) of each pair."""
        texts: list[tuple[list[int], list[int], int]] = []  # the context first: it is sorted
        for index, (_texts, context, tokens) in enumerate(requests):
            if len(tokens) > self.max_length:
                raise ValueError(f"{len(tokens)} tokens to score: make max_model_len larger")
            texts.append((context[-(self.max_length + 1 - len(tokens)) :], tokens, index))
        scores = [(0.0, True)] * len(texts)
        groups = [list(group) for _, group in groupby(sorted(texts), key=lambda text: text[0])]
        for begin in range(0, len(groups), CONTEXTS_AT_ONCE):
            some = groups[begin : begin + CONTEXTS_AT_ONCE]
            firsts = [group[0] for group in some]
            others = [text for group in some for text in group[1:]]
            for chosen in (firsts, others):
                prompts = [context + tokens for context, tokens, _index in chosen]
                starts = [len(context) for context, _tokens, _index in chosen]
                params = [SCORING.clone(prompt_logprob_start=start - 1) for start in starts]
                scored: Any = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
                for (*_pair, index), start, output in zip(chosen, starts, scored, strict=True):
                    found = [next(iter(each.values())) for each in output.prompt_logprobs[start:]]
                    total = sum(each.logprob for each in found)
                    scores[index] = total, all(each.rank == 1 for each in found)
        return scores

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that continues each context, up to the first of its stop strings."""
        prompts = []
        params = []
        for context, gen_kwargs in (request.args for request in requests):
            kwargs = dict(normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks))
            end = self.tokenizer.decode(self.eot_token_id)
            stop = handle_stop_sequences(list(filter(None, kwargs.pop("until"))), end)
            if not kwargs.pop("do_sample"):
                kwargs["temperature"] = 0.0
            prompt, most = maybe_truncate(
                self.tok_encode(context), kwargs.pop("max_gen_toks"), max_model_len=self.max_length
            )
            prompts.append(prompt)
            kwargs["skip_special_tokens"] = False  # the end of text is a stop string
            params.append(SamplingParams(max_tokens=most, stop=stop, **kwargs))
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        return [output.text for output in outputs]


if __name__ == "__main__":
    cli_evaluate()
