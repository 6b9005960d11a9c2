"""Computes greedy requests with transformers' generate, padded on the left; see __init__.py."""

from collections.abc import Sequence as Seq
from typing import Any

import torch
import transformers


def version() -> str:
    """Return the engine's name and version."""
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


class TransformersPeer:
    """A model.

    Args:
        num_threads: None is torch's number.
        more: further arguments of transformers' `generate`.
    """

    def __init__(self, model: str, num_threads: int | None = None, **more: Any) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._more = more

    def generate(self, requests: Seq[Any]) -> list[Any]:
        """Return the tokens and log-probabilities of each request of one batch."""
        width = max(len(prompt) for prompt, _ in requests)
        longest = max(params["max_tokens"] for _, params in requests)
        pads = [width - len(prompt) for prompt, _ in requests]
        ids = [[0] * pad + prompt for pad, (prompt, _) in zip(pads, requests, strict=True)]
        done = self._model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **self._more,
        )
        found = []
        for row, (_, params) in enumerate(requests):
            tokens = done.sequences[row, width : width + params["max_tokens"]].tolist()
            at_tokens = []
            for logits, token in zip(done.logits, tokens, strict=False):
                at_tokens.append([[token, float(logits[row].double().log_softmax(-1)[token])]])
            found.append([tokens, at_tokens, []])
        return found

    def counts(self) -> dict[str, int]:
        """Return nothing: the engine counts nothing that a way is about."""
        return {}


Engine = TransformersPeer
