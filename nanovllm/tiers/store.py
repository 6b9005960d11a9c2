"""`KVStore`: keeps entries of the prefix cache as bytes, longer than a process lives.

`open_store` opens the one that a path names; another kind, such as an object store, is one more
file with this class. Knows no pool, no block and no scheduler.
"""

import os
from collections.abc import Sequence as Seq
from typing import Protocol

from nanovllm.tiers.directory import DirectoryStore


class KVStore(Protocol):
    """Entries by their keys. One thread may write while others read.

    No method raises: an entry that cannot be had is a miss, and one that cannot be written is left
    out.
    """

    def has(self, key: bytes) -> bool:
        """Return whether there is an entry, in microseconds; `read` may find it damaged."""
        ...

    def read(self, key: bytes, buffers: Seq[memoryview]) -> bool:
        """Fill `buffers` with the entry's bytes, in the order in which they were written.

        Args:
            buffers: writable and contiguous, of uint8; one a page.

        Returns:
            False if the entry is missing, damaged, another's or of another size. What is in
            `buffers` then has no meaning.
        """
        ...

    def write(self, key: bytes, buffers: Seq[memoryview]) -> None:
        """Keep an entry, if there is room. Others see the whole of it or nothing.

        Does nothing if there is an entry of `key`.
        """
        ...

    def close(self) -> None:
        """Let the store go. Entries stay."""
        ...


def open_store(
    path: str | os.PathLike[str], limit_bytes: int, namespace: str, rank: int = 0
) -> KVStore:
    """Return the store at `path`, a directory, which is made if only the last part is missing.

    Args:
        limit_bytes: for the entries of all namespaces and ranks together; those that were not used
            for longest go first.
        namespace: lower-case hexadecimal, 16 to 64 digits: see `fingerprint`. Entries of other
            namespaces and ranks are never read.

    Raises:
        ConfigError: `path` is no directory, its parent is missing, or others could write to it.
    """
    return DirectoryStore(path, limit_bytes, namespace, rank)
