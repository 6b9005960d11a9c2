"""Files of MLX, which packs integers in a form of its own, are refused by that name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, demo_model
from nanovllm.errors import UnsupportedModelError
from nanovllm.worker.model_report import report

SETTINGS = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization": SETTINGS},
        {"quantization": SETTINGS, "quantization_config": SETTINGS},
        {"quantization": {**SETTINGS, "mode": "affine", "lm_head": {"group_size": 32, "bits": 8}}},
    ],
)
def test_a_quantised_checkpoint_of_mlx_is_named_so(tmp_path: Path, fields: dict) -> None:
    """Symptom: "quant_method None is not supported", or a list of misshapen tensors."""
    directory = Path(shutil.copytree(demo_model.MODEL, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim == 1:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        tensors[name] = torch.zeros(rows, columns // 8, dtype=torch.uint32)
        for part in ("scales", "biases"):
            tensors[name.replace("weight", part)] = torch.zeros(rows, columns // 64)
    save_file(tensors, directory / "model.safetensors", {"format": "mlx"})
    said = r"quantised by MLX \(bits 4, group_size 64\), whose form is not supported: take the orig"
    with pytest.raises(UnsupportedModelError, match=said):
        LLM(str(directory), max_model_len=64, num_kvcache_blocks=16)
    assert "MLX" in report(str(directory))["error"]
