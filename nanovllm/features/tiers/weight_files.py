"""`WeightSnapshot`: the digest of the real content of a checkpoint's weights.

A file is read once: its digest is remembered in this user's cache directory.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from nanovllm.utils import disk_cache

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise it when `_hash` or what is remembered changes
_CHUNK_BYTES = 16 * 2**20
"""Threads hash chunks of this size side by side. The file's digest is that of the chunks' digests,
as in a hash tree of two levels."""
_BUFFER_BYTES = 2**18  # what is read at once: it stays in a core's cache until it is hashed
_MAX_THREADS = 8
_MAX_REMEMBERED = 256  # files remembered; those that were not used for longest are forgotten
_RECENT_SECONDS = 2.0
"""A file may change again within one tick of the clock of its file system, with the same times. So
one that changed just now is not remembered."""
_LOCK_SECONDS = 60.0


class _Identity(NamedTuple):
    """A file whose identity stays has not changed. `ctime_ns` of a file cannot be set."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int


class WeightSnapshot:
    """The weight files of a model as they are when this is made: before they are loaded."""

    def __init__(self, files: Seq[Path]) -> None:
        self._files = [file.resolve() for file in files]
        self._before = self._identities()

    def digest(self) -> str:
        """Return a digest of the files' content, in hexadecimal. Call it once they are loaded.

        If a file has changed since this was made, it is unknown what was loaded: the digest is then
        one that no process had before. A warning says so.
        """
        try:
            digests = self._digests()
        except OSError as error:
            return _unknown(f"{error}")
        if self._before != self._identities():
            return _unknown("a file changed while it was loaded")
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def _identities(self) -> list[_Identity]:
        return [_identity(file) for file in self._files]

    def _digests(self) -> list[str]:
        cache = disk_cache.cache_directory(warn=False) if self._files else None
        with _locked(cache):  # the ranks of an engine hash the same files: one does it for all
            known = _read(cache)
            keys = [str(file) for file in self._files]
            wanted = dict(zip(keys, self._before, strict=True))
            used = {key: known.pop(key) for key in wanted if key in known}
            missing = [key for key in wanted if key not in used or used[key][0] != wanted[key]]
            for key, digest in zip(missing, _hash([Path(key) for key in missing]), strict=True):
                used[key] = (wanted[key], digest)
            newest = max((identity.ctime_ns for identity in self._before), default=0) / 1e9
            if missing and not abs(time.time() - newest) < _RECENT_SECONDS:
                _write(cache, {**known, **used})
        return [used[key][1] for key in keys]


_Known = dict[str, tuple[_Identity, str]]
"""By path: a file, and its digest. The last one used comes last."""


def _unknown(reason: str) -> str:
    logger.warning("KV of other processes is not used: the weights are unknown: %s", reason)
    return secrets.token_hex(32)


def _identity(file: Path) -> _Identity:
    """Return the identity of `file`; zeros if there is no such file."""
    try:
        status = file.stat()
    except OSError:  # its reader says what is wrong
        return _Identity(0, 0, 0, 0, 0)
    times = status.st_mtime_ns, status.st_ctime_ns
    return _Identity(status.st_dev, status.st_ino, status.st_size, *times)


def _hash(files: Seq[Path]) -> list[str]:
    """Return the digest of each of `files`: read in parallel, in hexadecimal."""
    if not files:
        return []
    start = time.monotonic()
    num_bytes = sum(file.stat().st_size for file in files)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "hash-weights") as pool:
        digests = [_hash_file(file, pool) for file in files]
    seconds = time.monotonic() - start
    logger.info("hashed %.2f GB of weights in %.1f s, once", num_bytes / 1e9, seconds)
    return digests


def _hash_file(file: Path, pool: ThreadPoolExecutor) -> str:
    size = file.stat().st_size
    whole = hashlib.sha256(str(size).encode())
    for part in pool.map(partial(_hash_chunk, file), range(0, max(size, 1), _CHUNK_BYTES)):
        whole.update(part)
    return whole.hexdigest()


def _hash_chunk(file: Path, offset: int) -> bytes:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with file.open("rb", buffering=0) as opened:
        opened.seek(offset)
        left = _CHUNK_BYTES
        while left > 0 and (count := opened.readinto(buffer[: min(left, _BUFFER_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _read(cache: Path | None) -> _Known:
    """Return what is remembered."""
    if cache is None:
        return {}
    try:
        version, files = json.loads(disk_cache.check_file(cache / "weights.json"))
        known = {path: (_Identity(*identity), digest) for path, identity, digest in files}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:  # damaged, or another's
        logger.info("hashing the weights again: %s", error)
        return {}
    return known if version == _FORMAT else {}


def _write(cache: Path | None, known: _Known) -> None:
    """Remember `known`, if there is a safe place."""
    if cache is None:
        return
    files = [(path, *entry) for path, entry in known.items()][-_MAX_REMEMBERED:]
    with contextlib.suppress(OSError), disk_cache.new_directory(cache) as new:
        file = Path(new, "weights.json")
        file.write_text(json.dumps([_FORMAT, files]), encoding="utf-8")
        disk_cache.seal(file)
        disk_cache.store(file, cache)


@contextlib.contextmanager
def _locked(cache: Path | None) -> Iterator[None]:
    """Let one process at a time in; none waits longer than `_LOCK_SECONDS`."""
    with contextlib.ExitStack() as stack:
        if cache is not None:
            with contextlib.suppress(OSError, NotImplementedError):  # no lock in time, or none here
                stack.enter_context(FileLock(cache / "weights.lock", _LOCK_SECONDS, mode=0o600))
        yield
