"""Proposes by the layer that the target's own checkpoint has for drafts."""

import torch

from nanovllm.speculation.proposers.draft_head import DraftHead
from nanovllm.speculation.proposers.features import capture_output
from nanovllm.speculation.proposers.mtp_head import MTPHead
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network


class MTP(DraftHead):
    """A layer for multi-token prediction. See `DraftHead`."""

    def __init__(self, target: Network, draft: NetworkSpec, max_num_batched_tokens: int) -> None:
        features_size = draft.model_config.hidden_size
        super().__init__(target, draft, max_num_batched_tokens, features_size)
        assert isinstance(self._head, MTPHead)
        self._head.share(self._target)

    def _capture(self, features: torch.Tensor) -> None:
        capture_output(self._target.model, features)
