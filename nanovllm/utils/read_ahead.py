"""Files read into the page cache before they are needed. Imports no torch: it starts before torch.

Knows nothing of the contents.
"""

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

_PIECE = 2 * 2**20
"""Bytes asked for at once. Linux reads no more of one request than this, the rest is ignored."""


def read_ahead(files: Iterable[Path]) -> None:
    """Let a thread ask the system for `files`, in order, up to half of the memory.

    The system reads many pieces at the same time: a disk that gives one reader 0.6 GB/s gave 3.
    A file that cannot be read is left to its reader, who reports the error.
    """
    if hasattr(os, "posix_fadvise"):
        arguments = list(files), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        threading.Thread(target=_ask, args=arguments, name="read-ahead", daemon=True).start()


def _ask(files: list[Path], limit: int) -> None:
    for path in files:
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = min(os.fstat(file.fileno()).st_size, limit)
            for start in range(0, size, _PIECE):
                os.posix_fadvise(file.fileno(), start, _PIECE, os.POSIX_FADV_WILLNEED)
            limit -= size
