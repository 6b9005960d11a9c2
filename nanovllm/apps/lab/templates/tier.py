"""A tier keeps the KV of prompts outside of the pool. This one writes files into a folder.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --kv-store my_tier:MyTier

The contract is `ByteStore` in nanovllm/features/tiers/tier.py. What it raises is logged once, and
what it should have given is computed.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nanovllm.features.tiers.tier import ByteStore

FOLDER = Path("my_tier_files")


class MyTier(ByteStore):
    """A file for each entry. Nothing is ever removed.

    Each rank has a store of its own, and the engine asks one of rank 0 what there is. One thread
    may write while others read.
    """

    def __init__(self, namespace: str, rank: int) -> None:
        # Another model, other options or another version have another namespace.
        self._folder = FOLDER / namespace / str(rank)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def has(self, key: bytes) -> bool:
        """Return whether there is an entry. Asked for each block of a prompt: be quick."""
        return self._path(key).exists()

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """Fill the buffers with an entry; return False if it is missing or of another size."""
        path = self._path(key)
        if not path.exists() or path.stat().st_size != sum(part.nbytes for part in buffers):
            return False
        with path.open("rb") as file:
            return all(file.readinto(part) == part.nbytes for part in buffers)

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """Keep an entry. Readers must never see a part of it: the file gets its name at the end."""
        descriptor, temporary = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(buffers)
        os.replace(temporary, self._path(key))

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.kv"
