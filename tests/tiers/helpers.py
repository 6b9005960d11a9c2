"""Entries and stores for the tests of nanovllm/features/tiers."""

import contextlib
import functools
import os
import random
import subprocess
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path

import pytest

from nanovllm.features.tiers.directory import DirectoryStore

NAMESPACE, OTHER_NAMESPACE = "ab" * 32, "cd" * 32
PAGE = 3000
"""Bytes of an entry's pages, if a test does not care."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount or give away")


def key(number: int) -> bytes:
    """Return a key as the scheduler makes them: a digest and a suffix."""
    return random.Random(number).randbytes(32) + [b"", b"w1", b"s"][number % 3]


@functools.lru_cache(maxsize=64)
def pages(number: int, sizes: Seq[int] = (PAGE,)) -> list[bytes]:
    """Return the bytes of entry `number`, which no other entry has."""
    rng = random.Random(f"pages {number}")
    return [rng.randbytes(size) for size in sizes]


def views(data: Seq[bytes]) -> list[memoryview]:
    return [memoryview(page) for page in data]


def write(store: DirectoryStore, number: int, sizes: Seq[int] = (PAGE,)) -> None:
    store.write(key(number), views(pages(number, sizes)))


def read(store: DirectoryStore, of_key: bytes, sizes: Seq[int] = (PAGE,)) -> list[bytes] | None:
    """Return the pages of an entry; None if `read` says that there is none."""
    buffers = [bytearray(b"?" * size) for size in sizes]
    found = store.read(of_key, [memoryview(buffer) for buffer in buffers])
    assert isinstance(found, bool)
    return [bytes(buffer) for buffer in buffers] if found else None


def holds(store: DirectoryStore, number: int, sizes: Seq[int] = (PAGE,)) -> bool:
    """Return whether entry `number` is there. What is read must be right."""
    found = read(store, key(number), sizes)
    assert found in (None, pages(number, sizes))
    return found is not None


def place(root: Path, number: int, namespace: str = NAMESPACE, rank: int = 0) -> Path:
    """Return the path of an entry's file."""
    name = key(number).hex()
    return root / namespace / f"rank{rank}" / name[:2] / name


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """Mount memory as a file system at `path`; skip the test where that is forbidden."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)
