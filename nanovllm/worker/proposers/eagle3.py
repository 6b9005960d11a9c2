"""Proposes by an EAGLE-3 draft head, which reads hidden states of the target.

The target stores them in a pool by slot, so they are there for prefix hits too. Behind the last
ones, the head reads its own output in their place.
"""

import copy

import torch

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.eagle3 import LlamaForCausalLMEagle3
from nanovllm.models.eagle3_config import Eagle3Config
from nanovllm.scheduler.messages import Row
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.kv_cache import zeros
from nanovllm.worker.network import Network, NetworkSpec, load_draft
from nanovllm.worker.proposers.draft_network import DraftNetwork


class Eagle3(DraftNetwork):
    """A draft head, loaded from `draft`.

    Its position i takes the token of position i + 1. The KV of drafts is computed again when they
    are accepted, because by then there are the target's hidden states.
    """

    def __init__(self, target: Network, draft: NetworkSpec, max_num_batched_tokens: int) -> None:
        network = load_draft(target, draft, target.max_model_len)
        super().__init__(network, max_num_batched_tokens, lag=1, keeps_drafts=False)
        head, config = network.model, draft.model_config
        assert isinstance(head, LlamaForCausalLMEagle3)
        assert isinstance(config, Eagle3Config)
        assert isinstance(target.model, DecoderForCausalLM)
        if head.embed_tokens is None:
            head.share_embedding(target.model.model.embed_tokens)
        head.check_tokens()
        self._target = target.model
        self._head = head
        self._config = config
        self._features_size = len(config.layer_ids) * config.target_hidden_size
        block_size = target.backend.block_size
        self.block_bytes += block_size * self._features_size * config.dtype.itemsize
        self._features: torch.Tensor | None = None
        self._token_ids: torch.Tensor | None = None
        """The target's token of each draft id; None if they are the same."""

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Make the pools, and let the target store hidden states.

        The feature pool has one more block, for the rows that pad a batch.
        """
        super().allocate(tables, num_blocks)
        shape = ((num_blocks + 1) * tables.block_size, self._features_size)
        self._features = zeros(shape, self._config.dtype, tables.device)
        self._target.capture_features(self._config.layer_ids, self._features)
        self._following = copy.copy(tables)  # each position holds the token of the next one
        self._following.token_ids = tables.token_ids[:, 1:]
        if self._config.has_d2t:
            draft_ids = torch.arange(self._config.draft_vocab_size, device=tables.device)
            self._token_ids = self._head.target_ids(draft_ids)

    def _forward(
        self,
        tables: DeviceTables,
        rows: list[Row],
        wanted: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self._features is not None
        batch = self._network.batch(self._following, rows, wanted)
        if hidden is None:
            hidden = self._head.combine(self._features[batch.slot_mapping])
        output: torch.Tensor = self._head(batch, hidden)
        return output

    def _logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
        logits = super()._logits(hidden, wanted)
        if logits is None or self._token_ids is None:
            return logits
        spread = logits.new_full((len(logits), self._config.vocab_size), -torch.inf)
        return spread.index_copy_(1, self._token_ids, logits)
