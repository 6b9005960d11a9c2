"""A model family says what the layers of a network have. This one has those of Qwen3.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --model-family my_family:MyFamily

The contract is nanovllm/models/decoder.py, and docs/changing.md lists the parts that there are.
Modules have the names of the checkpoint's tensors, so loading needs no code.
"""

from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig


class MyFamily(DecoderForCausalLM):
    """Attention with norms of queries and keys, then an MLP with a gate."""

    defaults: ClassVar[dict[str, Any]] = {}  # values of fields that config.json may lack
    names: ClassVar[
        dict[str, str]
    ] = {}  # the checkpoint's names for parts that are named otherwise

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        """Return layer `index`: a mixer, an MLP and norms."""
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            qk_norm=True,
            options=AttentionOptions(window=None),  # such as 1024 if index % 2 else None
        )
        return DecoderLayer(config, attention, GatedMLP(config))
