"""A clone without git-lfs has small text files in place of the large ones: the error says so."""

import json
import re
import shutil
from pathlib import Path

import pytest

from nanovllm import LLM, demo_model
from nanovllm.errors import CheckpointError
from nanovllm.features.lora.peft_files import read_adapter
from nanovllm.loading.hub import open_checkpoint
from nanovllm.worker.model_report import report

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4000000000\n"


def said(file: Path) -> str:
    return re.escape(f"{file} is a Git LFS pointer") + f".*`git lfs pull` in {file.parent}"


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_a_pointer_in_place_of_a_file_names_git_lfs(tmp_path: Path, name: str) -> None:
    """Symptom: its header had 2336927755350992246 bytes, and the remedy was the same download."""
    directory = Path(shutil.copytree(demo_model.MODEL, tmp_path / "model"))
    (directory / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=said(directory / name)):
        LLM(str(directory), max_model_len=64, num_kvcache_blocks=16)
    if name.startswith("model"):
        with pytest.raises(CheckpointError, match=said(directory / name)):
            report(str(directory))


def test_a_pointer_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    """As of a tokenizer.model beside a tokenizer.json that was pulled."""
    directory = Path(shutil.copytree(demo_model.MODEL, tmp_path / "model"))
    (directory / "tokenizer.model").write_text(POINTER)
    (directory / "consolidated.00.pth").write_text(POINTER)
    llm = LLM(str(directory), max_model_len=64, num_kvcache_blocks=16)
    llm.shutdown()


def test_a_pointer_in_place_of_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text(POINTER)
    with pytest.raises(CheckpointError, match=said(tmp_path / "x.gguf")):
        open_checkpoint(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pointer_in_place_of_an_adapter(tmp_path: Path, name: str) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_text(POINTER if file == name else json.dumps({}))
    with pytest.raises(CheckpointError, match=said(tmp_path / name)):
        read_adapter(str(tmp_path), 8)
