"""Keeps a directory of entries within its limit: removes those that were not used for longest.

Reads names, sizes and times of files, never their bytes. Other processes may write and remove files
at the same time.
"""

import contextlib
import itertools
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nanovllm.utils.system import MOVES_OPEN_FILES, READ_PRIVATE, WRITE_NEW, lock_file

logger = logging.getLogger(__name__)

NAMESPACE = re.compile(r"[0-9a-f]{16,64}")
_RANK = re.compile(r"rank\d{1,4}")
_GROUP = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"([0-9a-f]{2})+")
_TEMPORARY = re.compile(r"tmp-[0-9a-f]{32}")
"""All other names in the directory are not ours: such files are neither counted nor removed."""
_DISK_BLOCK = 4096
"""What a file system gives a file is a multiple of it."""
_EMPTY_SECONDS = 3600.0


class _Entry(NamedTuple):
    mtime_ns: int
    """When it was last used."""
    path: str
    num_bytes: int


def bytes_on_disk(num_bytes: int) -> int:
    """Return the bytes that a file of `num_bytes` takes."""
    return -(-num_bytes // _DISK_BLOCK) * _DISK_BLOCK


class Evictor:
    """Adds up the bytes in a directory, and removes entries in a separate thread when needed.

    It scans the directory at the first write, and whenever this process has written 1/16 of the
    limit: so a scan pays for many writes. It then removes entries down to 7/8, or to where the
    largest entry fits in. What others write in between it does not see: two processes stay within
    the limit together.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._total = 0  # at the last scan, and what this process has written since
        self._unscanned: int | None = None  # of it, written since; None: there was no scan
        self._largest = 0  # the largest file so far
        self._thread: threading.Thread | None = None
        self._closed = False

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a file of `num_bytes` fits in now; if not, begin to remove others."""
        size = bytes_on_disk(num_bytes)
        if size > self._limit:
            return False
        with self._lock:
            self._largest = max(self._largest, size)
            if self._total + size <= self._limit:
                return True
            self._start()
            return False

    def added(self, num_bytes: int) -> None:
        """Count a new file; begin to remove others if it is time."""
        with self._lock:
            self._total += bytes_on_disk(num_bytes)
            if self._unscanned is not None:
                self._unscanned += bytes_on_disk(num_bytes)
            if self._due():
                self._start()

    def settle(self) -> None:
        """Wait for the thread, if it runs."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """End the thread soon. The garbage collector may call this in any thread, also in that."""
        self._closed = True
        self.settle()

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="kv-evict", daemon=True)
            self._thread.start()

    def _due(self) -> bool:
        return self._unscanned is None or self._unscanned >= self._limit // 16

    def _run(self) -> None:
        while True:
            with self._lock:
                before = self._total
            total = self._scan_and_remove()
            with self._lock:
                written = self._total - before
                self._total = total + written
                self._unscanned = written
                if self._closed or not self._due():
                    self._thread = None
                    return

    def _scan_and_remove(self) -> int:
        """Return the bytes of what stays."""
        low = self._limit - max(self._limit // 8, self._largest)
        entries = list(itertools.takewhile(lambda _: not self._closed, _entries(self._root)))
        total = sum(entry.num_bytes for entry in entries)
        removed = 0
        for entry in sorted(entries):
            if total <= low or self._closed:
                break
            try:
                os.unlink(entry.path)
            except FileNotFoundError:  # another process was faster
                pass
            except OSError as error:
                logger.debug("cannot remove %s: %s", entry.path, error)
                continue
            removed += 1
            total -= entry.num_bytes
        logger.debug("%s: %d of %d entries removed", self._root, removed, len(entries))
        return total


def _entries(root: Path) -> Iterator[_Entry]:
    """Yield what lies in `root`; on the way, remove what dead processes and old namespaces left."""
    for namespace in _directories(str(root), NAMESPACE):
        for rank in _directories(namespace, _RANK):
            for file in _listed(rank):
                if _TEMPORARY.fullmatch(file.name):
                    _remove_if_abandoned(file.path)
            for group in _directories(rank, _GROUP):
                found = False
                for file in _listed(group):
                    found = True
                    if _ENTRY.fullmatch(file.name):
                        with contextlib.suppress(OSError):  # it is gone
                            status = file.stat(follow_symlinks=False)
                            size = bytes_on_disk(status.st_size)
                            yield _Entry(status.st_mtime_ns, file.path, size)
                if not found:
                    _remove_empty(group)
            _remove_empty(rank)
        _remove_empty(namespace)


def _directories(path: str, name: re.Pattern[str]) -> Iterator[str]:
    """Yield the directories in `path` with such a name; symbolic links are none."""
    for item in _listed(path):
        if name.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
            yield item.path


def _listed(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as items:
            return list(items)
    except OSError:  # another process removed it, or it cannot be read
        return []


def _remove_empty(path: str) -> None:
    """Remove directory `path` if it has been empty for a while: a new one is about to be used."""
    with contextlib.suppress(OSError):
        if os.lstat(path).st_mtime < time.time() - _EMPTY_SECONDS:
            os.rmdir(path)


def new_temporary(directory: str) -> tuple[int, str]:
    """Return a new file to write in `directory`, locked, and its path. The caller closes it.

    Without a lock it counts as abandoned; the system unlocks it when the process dies.

    Raises:
        OSError: the directory is full, read-only or missing.
    """
    while True:
        path = f"{directory}/tmp-{secrets.token_hex(16)}"
        fd = os.open(path, WRITE_NEW, 0o600)
        try:
            lock_file(fd)
            if os.fstat(fd).st_nlink:
                return fd, path
        except BlockingIOError:
            pass
        except OSError as error:  # a file system without locks: there, none counts as abandoned
            logger.debug("%s cannot be locked: %s", path, error)
            return fd, path
        os.close(fd)  # `_remove_if_abandoned` came between


def _remove_if_abandoned(path: str) -> None:
    """Remove a temporary file if no living process holds it."""
    with contextlib.suppress(OSError):
        if not MOVES_OPEN_FILES:  # then it goes only if nobody holds it
            os.unlink(path)
            return
        fd = os.open(path, READ_PRIVATE)
        try:
            lock_file(fd)
            os.unlink(path)
        finally:
            os.close(fd)
