"""What a job is: two jobs with the same identity write the same bytes. Knows no row."""

import hashlib
import os
from pathlib import Path
from typing import Any

from nanovllm import __version__
from nanovllm.batch.options import RowOptions

_END_BYTES = 2**20
"""So much of both ends of a large file is read, and its size."""


def job_identity(options: RowOptions, **more: Any) -> dict[str, Any]:
    """Return what decides the outputs of a job, for its manifest.

    Args:
        more: what it is beside its options, such as the digest of its input.
    """
    return {
        "nanovllm": __version__,
        **more,
        "model": options.model,
        "model's files": model_digest(options.model),
        **options.identity(),
    }


def model_digest(model: str) -> str:
    """Return a digest of a local checkpoint: names, sizes, and the ends of its files.

    A hub id names its files itself: its digest is that of the name.
    """
    path, digest = Path(model), hashlib.sha256()
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
