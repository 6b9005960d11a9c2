"""Pictures of Qwen2.5-VL: as Qwen3-VL's, but most layers see windows, and nothing is learned of
places.
"""

from collections.abc import Sequence

from nanovllm.errors import CheckpointError
from nanovllm.features.vision.family import CLIP_MEAN, CLIP_STD
from nanovllm.features.vision.qwen import QwenVL
from nanovllm.features.vision.tower import Merger, TowerConfig, VisionTower, axial_frequencies
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.models.parts import activation_of
from nanovllm.options.validation import check_int


class Qwen2_5VL(QwenVL):
    """Qwen2.5-VL."""

    mean, std = CLIP_MEAN, CLIP_STD
    least, most = 56**2, 28**2 * 1280

    def rope_axes(self, sections: Sequence[int] | None) -> tuple[int, ...]:
        """Return `axes`: time, then rows, then columns."""
        sizes = enumerate(sections or (16, 24, 24))
        return tuple(axis for axis, size in sizes for _ in range(size))

    def make_tower(self) -> VisionTower:
        num_layers = self.size("depth", 32, high=256)
        where = "config.json: vision_config.fullatt_block_indexes"
        given = self.vision_config.get("fullatt_block_indexes", (7, 15, 23, 31))
        whole = {check_int(CheckpointError, where, index, 0, num_layers - 1) for index in given}
        config = TowerConfig(
            **self.sizes(32, 3584, 3420, 16, ("depth", "num_heads")),
            patch_shape=(3, self.frames, self.patch, self.patch),
            activation=activation_of(self.vision_config.get("hidden_act", "silu"), "hidden_act"),
            norm=RMSNorm,
            gated=True,
            patch_bias=False,
            windowed=frozenset(range(num_layers)) - whole,
            window=max(self.size("window_size", 112) // self.merge // self.patch, 1),
        )
        merger = Merger(
            config,
            self.merge**2,
            self.size("out_hidden_size", 3584),
            RMSNorm(config.hidden_size, config.eps),
        )
        inv_freq = axial_frequencies(config.head_dim, self.rope_theta(10000.0))
        tower = VisionTower(config, None, merger, inv_freq=inv_freq, fused=True)
        tower.places = ("model.visual.", "visual.")
        tower.names = {
            r"^patch_embed": "patch_embed.proj",
            r"^layers": "blocks",
            r"\.mlp\.fc2": ".mlp.down_proj",
            r"^merger\.norm": "merger.ln_q",
            r"^merger\.linear_fc1": "merger.mlp.0",
            r"^merger\.linear_fc2": "merger.mlp.2",
        }
        return tower
