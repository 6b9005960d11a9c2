"""The digest of weights: of their content, and read once."""

import logging
import os
import random
import threading
import time
from pathlib import Path

import pytest

from nanovllm.features.tiers import weight_files
from nanovllm.features.tiers.weight_files import WeightSnapshot

BYTES = 100_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, caplog) -> Path:
    """The private directory, with small chunks, so that a file has several."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_files, "_CHUNK_BYTES", 30_000)
    monkeypatch.setattr(weight_files, "_BUFFER_BYTES", 1000)
    monkeypatch.setattr(weight_files, "_RECENT_SECONDS", -1.0)  # remember new files, too
    return tmp_path / "cache" / "nanovllm"


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    found = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for number, path in enumerate(found):
        path.write_bytes(random.Random(number).randbytes(BYTES + number))
    return found


def num_hashed(caplog) -> int:
    return sum("hashed" in record.message for record in caplog.records)


def test_files_are_hashed_once(paths, caplog, cache):
    digests = {WeightSnapshot(paths).digest() for _ in range(3)}
    assert len(digests) == 1
    assert num_hashed(caplog) == 1
    assert (cache / "weights.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("offset", [0, 29_999, 30_000, 60_000, BYTES - 1])
def test_a_changed_byte_with_the_same_size_and_times(paths, caplog, offset):
    before = WeightSnapshot(paths).digest()
    status = paths[0].stat()
    with paths[0].open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(paths[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert paths[0].stat().st_mtime_ns == status.st_mtime_ns
    assert WeightSnapshot(paths).digest() != before
    assert num_hashed(caplog) == 2


def test_another_file_in_the_same_place(paths, tmp_path):
    """Size and time of the first one, and renamed: only inode and ctime differ."""
    before, status = WeightSnapshot(paths).digest(), paths[0].stat()
    other = tmp_path / "other"
    other.write_bytes(random.Random(9).randbytes(BYTES))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(paths[0])
    assert WeightSnapshot(paths).digest() != before


def test_what_differs(paths, tmp_path):
    """Order, a part, appended zeros, nothing."""
    longer = tmp_path / "longer"
    longer.write_bytes(paths[0].read_bytes() + b"\0")
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    sets = [paths, paths[::-1], paths[:1], [longer, paths[1]], [], [empty], [empty, empty]]
    assert len({WeightSnapshot(files).digest() for files in sets}) == len(sets)


def test_a_file_that_changes_while_it_is_loaded(paths, caplog):
    """Nobody knows what was loaded: no process has this digest."""
    digests = set()
    for _ in range(2):
        weights = WeightSnapshot(paths)
        paths[0].write_bytes(paths[0].read_bytes())
        digests.add(weights.digest())
    paths[0].unlink()
    digests.add(WeightSnapshot(paths).digest())
    assert len(digests) == 3
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 3


def test_a_file_that_changed_just_now_is_not_remembered(paths, caplog, monkeypatch):
    """It may change again within the clock's tick."""
    monkeypatch.setattr(weight_files, "_RECENT_SECONDS", 60.0)
    assert WeightSnapshot(paths).digest() == WeightSnapshot(paths).digest()
    assert num_hashed(caplog) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"{}"),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes().replace(b"a", b"b")),
        lambda file: file.chmod(0o666),
        lambda file: file.unlink(),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
)
def test_a_damaged_memory_is_not_believed(paths, caplog, cache, damage):
    before = WeightSnapshot(paths).digest()
    damage(cache / "weights.json")
    assert WeightSnapshot(paths).digest() == before
    assert num_hashed(caplog) == 2


def test_no_safe_place(paths, caplog, cache):
    cache.parent.mkdir()
    cache.parent.chmod(0o777)
    assert WeightSnapshot(paths).digest() == WeightSnapshot(paths).digest()
    assert num_hashed(caplog) == 2


def test_ranks_hash_once_together(paths, caplog, monkeypatch):
    hashed = weight_files._hash

    def slowly(files):
        time.sleep(0.1)
        return hashed(files)

    monkeypatch.setattr(weight_files, "_hash", slowly)
    digests: list[str] = []
    ranks = [threading.Thread(target=lambda: digests.append(WeightSnapshot(paths).digest()))] * 1
    ranks += [threading.Thread(target=lambda: digests.append(WeightSnapshot(paths).digest()))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(digests) == 2
    assert len({*digests}) == 1
    assert num_hashed(caplog) == 1
