"""The EAGLE-3 draft head (arXiv 2503.01840): one layer over three hidden states of its target.

Position i takes the embedding of token i + 1 and the target's features of position i, and drafts
token i + 2. After the last features it continues with its own output in their place.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.errors import CheckpointError
from nanovllm.features.speculation.proposers.draft_head import Head
from nanovllm.features.speculation.proposers.eagle3_config import NUM_FEATURES, Eagle3Config
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.loading.shards import Shard
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.utils.distributed import tensor_parallel


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads the embedding and the hidden state side by side."""

    def __init__(self, config: Eagle3Config, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self._norm_before_residual = config.norm_before_residual
        self.self_attn = SelfAttention(
            config,
            rotary_emb,
            bias=config.flag("attention_bias"),
            output_bias=config.flag("attention_bias"),
            qk_norm=config.qk_norm,
            input_size=2 * config.hidden_size,
        )
        self.mlp = GatedMLP(config, bias=config.flag("mlp_bias"))
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        batch: Batch,
        output_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of all T tokens; return (MLP output, residual), [O, hidden_size] each."""
        embeds, _ = self.input_layernorm.add_norm(None, embeds)
        normed, residual = self.hidden_norm.add_norm(None, hidden)
        joined = self.hidden_norm.kernels.join_columns((embeds, normed))
        if self._norm_before_residual:
            residual = normed
        hidden = self.self_attn(joined, batch, output_indices)
        if output_indices is not None:
            residual = residual[output_indices]
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, residual)
        return self.mlp(hidden), residual


class DraftVocabulary(nn.Module):
    """The token that each draft id stands for: the checkpoint's d2t holds the differences."""

    d2t: torch.Tensor

    def __init__(self, draft_vocab_size: int) -> None:
        super().__init__()
        d2t = torch.zeros(draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", d2t, persistent=False)

    def forward(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens [N] of `draft_ids` [N]."""
        return draft_ids + self.d2t[draft_ids]

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield the whole table: each rank has it."""
        yield Shard(prefix, tuple(self.d2t.shape), self.d2t)


class LlamaForCausalLMEagle3(Head):
    """The head. Its modules have the names of the authors' checkpoints.

    Args:
        max_model_len: number of positions in the table of rotary angles; the positions that the
            head was trained for are not a limit, because drafts only have to be likely.
    """

    def __init__(self, config: Eagle3Config, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        hidden_size = config.hidden_size
        eps = config.rms_norm_eps
        features_size = self.features_size = NUM_FEATURES * config.target_hidden_size
        self.input_norm = RMSNorm(features_size, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_hidden_size, eps) for _ in range(NUM_FEATURES * config.fc_norm)
        )
        self.fc = RowParallelLinear(features_size, hidden_size, bias=False)
        rotary_emb = RotaryEmbedding(
            max_model_len, *config.rope.inverse_frequencies(config.head_dim)
        )
        self.midlayer = Eagle3Layer(config, rotary_emb)
        self.norm = RMSNorm(hidden_size, eps)
        self.lm_head = ParallelLMHead(config.draft_vocab_size, hidden_size)
        self.d2t = DraftVocabulary(config.draft_vocab_size) if config.has_d2t else None
        self.embed_tokens: VocabParallelEmbedding | None = None
        self._embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        if config.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden_size)
            self._embed = self.embed_tokens.forward
        self.ignored_weights = frozenset({"t2d", "model.t2d"})

    def share(self, target: DecoderForCausalLM) -> torch.Tensor | None:
        """See `Head`. The embedding may be the head's own.

        Raises:
            CheckpointError: a draft id stands for no token of the vocabulary: it would be read as
                a row of memory.
        """
        if self.embed_tokens is None:
            self._embed = target.model.embed_tokens.forward
        if self.d2t is None:
            return None
        tokens: torch.Tensor = self.d2t(torch.arange(len(self.d2t.d2t), device=self.d2t.d2t.device))
        wrong = (tokens < 0) | (tokens >= self.config.vocab_size)
        if wrong.any():
            index = int(wrong.nonzero()[0, 0])
            raise CheckpointError(
                f"d2t: draft id {index} stands for token {int(tokens[index])}, but the vocabulary "
                f"has {self.config.vocab_size}"
            )
        return tokens

    def capture(self, target: DecoderForCausalLM, features: torch.Tensor) -> None:
        """See `Head`."""
        capture_features(target, self.config.layer_ids, features)

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        """Return the checkpoint's name of tensor `name`: one of the published ones."""
        other = name.replace("midlayer.", "layers.0.", 1)
        names = (name, other, f"model.{name}", f"model.{other}")
        return next((each for each in names if each in known), name)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """See `Head`. `features` are what enters three of the target's layers, side by side."""
        join = self.norm.kernels.join_columns
        if self.input_norm is not None:
            features, _ = self.input_norm.add_norm(None, features)
        if len(self.fc_norm):
            parts = features.chunk(NUM_FEATURES, dim=1)
            whole = [join((part,)) for part in parts]
            norms = [norm for norm in self.fc_norm if isinstance(norm, RMSNorm)]
            normed = [norm.add_norm(None, x)[0] for norm, x in zip(norms, whole, strict=True)]
            features = join(normed)
        rank = tensor_parallel().rank
        size = features.shape[1] // tensor_parallel().size
        return self.fc(features[:, rank * size : (rank + 1) * size])

    def forward(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """See `Head`. What is fed back is before the last norm, unless the config says
        `norm_output`.
        """
        assert self._embed is not None, "share() comes first"
        embeds = self._embed(batch.input_ids)
        output, residual = self.midlayer(embeds, hidden, batch, batch.output_indices)
        normed, total = self.norm.add_norm(output, residual)
        return normed if self.config.norm_output else total

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """See `Head`: V is `draft_vocab_size`."""
        if not self.config.norm_output:
            hidden, _ = self.norm.add_norm(None, hidden)
        return self.lm_head(hidden)


def capture_features(
    model: DecoderForCausalLM, layer_ids: Sequence[int], pool: torch.Tensor
) -> None:
    """Store what enters the layers `layer_ids` in `pool`, from the next forward pass on.

    Args:
        layer_ids: from 0 on, each one once.
        pool: [slots, len(layer_ids) * hidden_size], a row for each slot of the KV cache. The
            layers' hidden states lie side by side in the order of `layer_ids`.
    """
    parts = pool.chunk(len(layer_ids), dim=1)
    for layer_id, part in zip(layer_ids, parts, strict=True):
        layer = model.model.layers[layer_id]
        assert isinstance(layer, DecoderLayer)
        layer.store_input = functools.partial(layer.input_layernorm.kernels.store_rows, part)
