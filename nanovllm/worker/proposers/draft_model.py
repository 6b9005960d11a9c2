"""Proposes what a smaller model of the same vocabulary goes on with.

Its KV lies in the target's blocks, in a pool of its own. Knows no acceptance.
"""

import torch

from nanovllm.scheduler.messages import Row, Schedule
from nanovllm.utils.distributed import broadcast_from_first
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.network import Network, NetworkSpec, load_draft
from nanovllm.worker.proposers.draft_kv import FEW_TOKENS, DraftKV
from nanovllm.worker.sampling import SamplingRows


class DraftModel:
    """A draft model.

    A draft is what the model itself would sample with the request's parameters and with the
    target's random number of the position: where the two models agree, so do the draws.

    Args:
        draft: the model to load; its blocks are as large as the target's.
        max_num_batched_tokens: tokens that it computes at once, at most.
    """

    def __init__(self, target: Network, draft: NetworkSpec, max_num_batched_tokens: int) -> None:
        network = load_draft(target, draft)
        self.block_bytes = network.block_bytes
        self._network = network
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tables: DeviceTables | None = None
        self._kv: DraftKV | None = None

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Make the KV pool, and record the model's small steps."""
        self._tables = tables
        self._kv = DraftKV(len(tables.params), num_blocks, tables.block_size)
        self._network.make_pool(num_blocks)
        self._network.record(tables)

    def admit(self, schedule: Schedule) -> None:
        """Note which blocks have new owners."""
        assert self._kv is not None
        self._kv.admit(schedule)

    def propose(self, rows: list[Row]) -> list[int]:
        """Write drafts for `rows`; return how many each row got: none past the model's positions.

        See `Proposer`.
        """
        tables, kv, network = self._tables, self._kv, self._network
        assert tables is not None, "allocate() comes first"
        assert kv is not None
        # Draft j takes the KV of position num_known_tokens + j - 1.
        room = network.max_model_len + 1
        counts = [max(0, min(r.num_draft_tokens, room - r.num_known_tokens)) for r in rows]
        drafting = {row: count for row, count in zip(rows, counts, strict=True) if count}
        if not drafting:
            return counts
        blocks_to_zero = [
            block
            for row, count in drafting.items()
            for block in kv.begun_blocks(row, row.num_known_tokens + count - 1)
        ]
        network.zero_blocks(blocks_to_zero, tables)
        num_allowed = max(1, min(FEW_TOKENS, self._max_num_batched_tokens // len(drafting)))
        for chunk in kv.chunks(list(drafting), num_allowed, self._max_num_batched_tokens):
            network.forward(tables, chunk, tables.upload([]))
        for index in range(max(counts)):
            step = []
            for row, count in drafting.items():
                if index < count:
                    end = row.num_known_tokens + index
                    start = end - 1 if index else kv.start(row)
                    step.append(Row(row.seq_id, row.table_idx, start, end - start, samples=True))
            self._draft(tables, step)
        for row, count in drafting.items():
            kv.set_right(row.table_idx, row.num_known_tokens)
            kv.set_drafted(row.table_idx, row.num_known_tokens + count - 1)
        return counts

    def _draft(self, tables: DeviceTables, rows: list[Row]) -> None:
        """Compute `rows`, and write one draft behind each."""
        sampling = SamplingRows(tables, rows, runs_processors=False)
        hidden = self._network.forward(tables, rows, sampling.last_tokens)
        logits = self._network.logits(hidden, sampling.last_tokens)
        tokens = torch.empty_like(sampling.last_tokens)
        if logits is not None:
            tokens = sampling.sample(logits)
        sampling.store(broadcast_from_first(tokens))
