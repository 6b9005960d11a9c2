"""A logits rule changes the logits of the requests that ask for it. This one forbids repetitions.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --logits-rules my_rule:MyRule

Then a request may have it: over HTTP by "vllm_xargs": {"my_rule": 8}, in Python by
SamplingParams(extra_args={"my_rule": 8}). The contract is `LogitsRule` in
nanovllm/layers/logits_rules.py.
"""

from typing import Any, ClassVar

import torch

from nanovllm.layers.logits_rules import LogitsRule


class MyRule(LogitsRule):
    """Forbids the last `value` tokens of the prompt and the output, each rank for its rows."""

    name: ClassVar[str] = "my_rule"
    """What requests call it."""

    @classmethod
    def check(cls, value: Any) -> int:
        """Return a request's value as the rule takes it, or raise ValueError: it is refused."""
        if type(value) is not int or not 1 <= value <= 1000:
            raise ValueError("give a number of tokens from 1 to 1000")
        return value

    def __init__(self, value: int, num_prompt_tokens: int, device: torch.device) -> None:
        self._num_tokens = value  # made when the request first samples

    def apply(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Change logits [vocab_size] in place. `tokens` [n] are the prompt and the output so far.

        Keep no state: drafts show it several positions, and a preempted request gets a new rule.
        Do not wait for the GPU: no `if` on a tensor, no boolean index, no .item().
        """
        logits.index_fill_(0, tokens[-self._num_tokens :], -torch.inf)
