"""A proposer guesses the next tokens of a request. This one guesses that the last ones come again.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --speculative-config '{"method": "my_proposer:MyProposer"}'

The contract is nanovllm/features/speculation/proposers/proposer.py. One step of the model verifies
the guesses, so a proposer may guess anything: it changes no token. How many drafts a row gets is
decided by what was accepted, and by measured costs.
"""

from nanovllm.core.messages import Row
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.network import Network

PERIOD = 4
"""Tokens after which the text is taken to repeat."""


class MyProposer(Proposer):
    """Proposes the tokens PERIOD places back. Each rank has one, and all must propose the same."""

    def __init__(self, network: Network) -> None:
        self._network = network  # the model: its weights, and the hidden size in model_config

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Prepare for the tables, which hold the tokens of the running sequences."""
        self._tables = tables

    def propose(self, rows: list[Row]) -> list[int]:
        """Write up to num_draft_tokens tokens of each row; return how many each row got.

        Tokens before sample_position are known. What is after them means nothing yet.
        """
        for row in rows:
            tokens = self._tables.token_ids[row.table_idx]  # [max_model_len + 1], on the device
            start = row.sample_position
            for position in range(start, start + row.num_draft_tokens):
                tokens[position] = tokens[max(0, position - PERIOD)]
        return [row.num_draft_tokens for row in rows]
