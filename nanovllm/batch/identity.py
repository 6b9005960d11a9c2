"""What a job is: two jobs with the same identity write the same bytes. Knows no row."""

import hashlib
import os
from pathlib import Path
from typing import Any

from nanovllm import __version__
from nanovllm.batch.options import RowOptions
from nanovllm.checkpoint.files import check_file, local_path
from nanovllm.options.lora_request import named_adapters

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_END_BYTES = 2**20
"""So much of both ends of a large file is read, and its size."""


def job_identity(options: RowOptions, **more: Any) -> dict[str, Any]:
    """Return what decides the outputs of a job, for its manifest.

    Args:
        more: what it is beside its options, such as the digest of its input.

    Raises:
        CheckpointError: an adapter's file is outside its directory, or no regular file.
    """
    named = named_adapters(options.batch.lora_modules, ())
    adapters = {name: adapter.lora_path for name, adapter in named.items()}
    merged = options.engine_options.get("lora")
    if merged is not None:
        adapters[""] = str(merged)
    return {
        "nanovllm": __version__,
        **more,
        "model": options.model,
        "model's files": model_digest(options.model),
        "adapters' files": {name: adapter_digest(path) for name, path in adapters.items()},
        **options.identity(),
    }


def model_digest(model: str) -> str:
    """Return a digest of a local checkpoint: names, sizes, and the ends of its files.

    A hub id names its files itself: its digest is that of the name.
    """
    path = Path(model)
    digest = hashlib.sha256()
    if not path.exists():
        return hashlib.sha256(model.encode()).hexdigest()
    files = [path] if path.is_file() else sorted(item for item in path.iterdir() if item.is_file())
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_END_BYTES))
            if file.stat().st_size > 2 * _END_BYTES:
                opened.seek(-_END_BYTES, os.SEEK_END)
            digest.update(opened.read(_END_BYTES))
    return digest.hexdigest()


def adapter_digest(path: str) -> str:
    """Return a digest of the whole files of an adapter; without files it is that of the path.

    Raises:
        CheckpointError: a file is outside the directory, or no regular file.
    """
    directory = local_path(path, "adapter")
    digest = hashlib.sha256()
    for name in _ADAPTER_FILES:
        if check_file(directory, name):
            with (directory / name).open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        else:
            digest.update(f"{name}\0{path}".encode())
    return digest.hexdigest()
