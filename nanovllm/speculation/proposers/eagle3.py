"""Proposes by an EAGLE-3 draft head, which reads what enters three layers of the target."""

import torch

from nanovllm.speculation.proposers.draft_head import DraftHead
from nanovllm.speculation.proposers.eagle3_config import Eagle3Config
from nanovllm.speculation.proposers.eagle3_head import LlamaForCausalLMEagle3
from nanovllm.speculation.proposers.features import capture_features
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network


class Eagle3(DraftHead):
    """An EAGLE-3 head. See `DraftHead`."""

    def __init__(self, target: Network, draft: NetworkSpec, max_num_batched_tokens: int) -> None:
        config = draft.model_config
        assert isinstance(config, Eagle3Config)
        features_size = len(config.layer_ids) * config.target_hidden_size
        super().__init__(target, draft, max_num_batched_tokens, features_size)
        head = self._head
        assert isinstance(head, LlamaForCausalLMEagle3)
        if head.embed_tokens is None:
            head.share_embedding(self._target.model.embed_tokens)
        head.check_tokens()
        self._layer_ids = config.layer_ids
        if config.has_d2t:
            draft_ids = torch.arange(config.draft_vocab_size, device=target.device)
            self._token_ids = head.target_ids(draft_ids)

    def _capture(self, features: torch.Tensor) -> None:
        capture_features(self._target, self._layer_ids, features)
