import os
import threading

import pytest

from nanovllm.utils import pages
from nanovllm.utils.pages import read_ahead

PIECE = 2 * 2**20


@pytest.fixture
def asked(monkeypatch):
    """Return the pieces that the system is asked for: (name of the file, start)."""
    found = []

    def note(descriptor, start, length, advice):
        assert (length, advice) == (PIECE, os.POSIX_FADV_WILLNEED)
        found.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), start))

    monkeypatch.setattr(pages.os, "posix_fadvise", note)
    return found


def write(path, size):
    with path.open("wb") as file:
        file.truncate(size)
    return path


def wait():
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join()


def test_all_files_are_asked_for_in_order(tmp_path, asked):
    first, second = write(tmp_path / "a", 2 * PIECE + 1), write(tmp_path / "b", 10)
    read_ahead([first, tmp_path / "missing", second])
    wait()
    assert asked == [("a", 0), ("a", PIECE), ("a", 2 * PIECE), ("b", 0)]


def test_half_of_the_memory_is_the_limit(tmp_path, asked, monkeypatch):
    sizes = {"SC_PHYS_PAGES": 6 * PIECE // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(pages.os, "sysconf", sizes.__getitem__)
    read_ahead([write(tmp_path / "a", 2 * PIECE), write(tmp_path / "b", 2 * PIECE)])
    wait()
    assert asked == [("a", 0), ("a", PIECE), ("b", 0)]
