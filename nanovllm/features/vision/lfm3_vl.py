"""Pictures of LFM3-VL: Qwen's sizes, and a tower most of whose layers are convolutions."""

from collections.abc import Sequence

from nanovllm.errors import CheckpointError
from nanovllm.features.vision.family import CLIP_MEAN, CLIP_STD
from nanovllm.features.vision.lfm2_vl import lfm_merger
from nanovllm.features.vision.qwen import QwenVL
from nanovllm.features.vision.tower import TowerConfig, VisionTower, axial_frequencies
from nanovllm.layers.layernorm import LayerNorm, RMSNorm
from nanovllm.options.validation import check_float, shown

_KINDS = ("conv", "full_attention")


class Lfm3VL(QwenVL):
    """LFM3-VL, whose text model counts a picture's tokens as it counts text."""

    mean, std = CLIP_MEAN, CLIP_STD
    least, most = 56**2, 28**2 * 1280

    def rope_axes(self, sections: Sequence[int] | None) -> tuple[int, ...]:
        return ()

    def make_tower(self) -> VisionTower:
        eps = self.vision_config.get("norm_eps", 1e-5)
        config = TowerConfig(
            **self.sizes(14, 1024, 2560, 16),
            patch_shape=(3 * self.frames * self.patch**2,),
            activation="silu",
            eps=check_float(CheckpointError, "config.json: vision_config.norm_eps", eps, 0.0),
            norm=RMSNorm,
            bias=False,
            gated=True,
            patch_bias=False,
            norm_first=True,
            num_kv_heads=self.size("num_key_value_heads", 8, high=1024),
            qk_norm=True,
            convolved=self._convolved(),
            kernel_size=self.size("conv_kernel_size", 3, high=65),
        )
        merger = lfm_merger(self, config, LayerNorm(config.hidden_size, 1e-6), 4096)
        inv_freq = axial_frequencies(config.head_dim, self.rope_theta(1e6))
        tower = VisionTower(config, None, merger, inv_freq=inv_freq)
        tower.places = ("model.", "")
        tower.parts = ("vision_tower.", "multi_modal_projector.")
        tower.names = {
            r"^merger\.norm": "multi_modal_projector.layer_norm",
            r"^merger\.linear_fc": "multi_modal_projector.linear_",
            r"^patch_embed": "vision_tower.patchifier",
            r"^norm_first": "vision_tower.embedding_norm",
            r"^layers": "vision_tower.layers",
            r"\.attn\.(in_proj|out_proj)": r".conv.\1",
            r"\.attn\.conv": ".conv.spatial_conv",
            r"\.attn\.proj": ".self_attn.out_proj",
            r"\.attn\.([qk])_norm": r".self_attn.\1_layernorm",
            r"\.attn\.": ".self_attn.",
            r"\.norm1": ".operator_norm",
            r"\.norm2": ".ffn_norm",
            r"\.mlp\.gate_proj": ".feed_forward.w1",
            r"\.mlp\.up_proj": ".feed_forward.w3",
            r"\.mlp\.fc2": ".feed_forward.w2",
        }
        return tower

    def _convolved(self) -> frozenset[int]:
        """Return the layers that are convolutions."""
        num_layers = self.size("num_hidden_layers", 14, high=256)
        default = [_KINDS[index >= 2 and index % 2 == 0] for index in range(num_layers)]
        found = self.vision_config.get("layer_types") or default
        known = isinstance(found, list) and all(kind in _KINDS for kind in found)
        if not known or len(found) != num_layers:
            raise CheckpointError(
                f"config.json: vision_config.layer_types must be {' or '.join(_KINDS)} for each of "
                f"{num_layers} layers, is {shown(found)}"
            )
        return frozenset(index for index, kind in enumerate(found) if kind == "conv")
