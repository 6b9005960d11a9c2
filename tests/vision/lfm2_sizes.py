"""The arithmetic of transformers' image processor of LFM2-VL, which has none on Pillow.

The file cannot be imported without torchvision. Its functions of sizes need only math.
"""

import ast
import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

_WANTED = frozenset(
    (
        "_get_grid_layout",
        "_is_image_too_large",
        "_target_ratios",
        "find_closest_aspect_ratio",
        "round_by_factor",
        "smart_resize",
    )
)


def _source() -> dict[str, Any]:
    """Return transformers' functions of sizes by name, methods among them."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "models/lfm2_vl/image_processing_lfm2_vl.py"
    tree = ast.parse(path.read_text("utf-8"))
    functions: list[ast.stmt] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in _WANTED
    ]
    found: dict[str, Any] = {"math": math, "lru_cache": functools.lru_cache}
    exec(compile(ast.Module(functions, []), str(path), "exec"), found)
    assert found.keys() >= _WANTED
    return found


class Lfm2Sizes:
    """What transformers makes of a picture's sides.

    Args:
        sizes: fields of preprocessor_config.json.
    """

    _FUNCTIONS = _source()

    def __init__(self, **sizes: Any) -> None:
        self.sizes = {
            "downsample_factor": 2,
            "min_image_tokens": 64,
            "max_image_tokens": 256,
            "encoder_patch_size": 16,
            "min_tiles": 2,
            "max_tiles": 10,
            "tile_size": 512,
            "max_pixels_tolerance": 2.0,
            **sizes,
        }

    def __getattr__(self, name: str) -> Any:
        """Return one of transformers' methods."""
        if name not in _WANTED:
            raise AttributeError(name)
        return functools.partial(self._FUNCTIONS[name], self)

    def _some(self, *names: str) -> dict[str, Any]:
        return {name: self.sizes[name] for name in names}

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the whole picture."""
        tokens = self._some("min_image_tokens", "max_image_tokens")
        patches = self._some("downsample_factor", "encoder_patch_size")
        width, height = self.smart_resize(height, width, **tokens, **patches)
        return height, width

    def grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Return the rows and columns of tiles; None: there are none."""
        names = "max_image_tokens", "max_pixels_tolerance", "downsample_factor"
        if not self._is_image_too_large(height, width, **self._some(*names, "encoder_patch_size")):
            return None
        tiles = self._some("min_tiles", "max_tiles", "tile_size")
        columns, rows, *_ = self._get_grid_layout(height, width, **tiles)
        return rows, columns
