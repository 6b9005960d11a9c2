"""A step runner runs the steps that fit it in another way. This one runs them layer by layer.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --step-runner my_runner:MyRunner

The contract is `StepRunner` in nanovllm/worker/hooks.py. It is asked first; a step that does
not fit it runs as it would without it.
"""

from collections import Counter

from nanovllm.core.messages import Row
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.hooks import StepRunner, StepTensors
from nanovllm.worker.network import Network


class MyRunner(StepRunner):
    """Runs steps of one token a row, and counts them by size. Each rank has one."""

    def __init__(self, network: Network, tables: DeviceTables) -> None:
        self._network = network  # the layers, the KV pool and the attention backends
        self._tables = tables  # tokens, block tables and sampling parameters
        self.num_steps: Counter[int] = Counter()

    def fits(self, rows: list[Row]) -> bool:
        """Return whether it runs a step of `rows`. It is asked before each step: be quick."""
        return all(row.num_scheduled_tokens == 1 for row in rows)

    def run(self, rows: list[Row]) -> StepTensors:
        """Write the KV of all tokens of `rows`; return their hidden states [T, hidden_size].

        Returned tokens [T] would be taken as sampled from them.
        """
        self.num_steps[len(rows)] += 1
        return StepTensors(hidden=self._network.forward(self._tables, rows, None))
