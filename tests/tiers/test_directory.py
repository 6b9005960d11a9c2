"""A store in a directory: what it keeps, what it refuses, and what it survives."""

import contextlib
import logging
import os
import resource
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from nanovllm.errors import ConfigError
from nanovllm.features.tiers import directory
from nanovllm.features.tiers.directory import MAX_KEY_BYTES, DirectoryStore, file_bytes
from tests.every_case import examples
from tests.tiers.helpers import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PAGE,
    as_root,
    files,
    holds,
    key,
    mounted,
    pages,
    place,
    read,
    remount,
    views,
    write,
)

MIB = 2**20
OTHER_USER = 12345
OFTEN: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(root) -> DirectoryStore:
    return DirectoryStore(root, MIB, NAMESPACE)


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("sizes", [(PAGE,), (1, 0, 5000, 7), (1,) * 3000, ()])
def test_an_entry_comes_back_in_another_store(root, sizes):
    first = DirectoryStore(root, MIB, NAMESPACE)
    assert not first.has(key(0))
    write(first, 0, sizes)
    first.close()
    second = DirectoryStore(root, MIB, NAMESPACE)
    assert second.has(key(0))
    assert holds(second, 0, sizes)
    assert not second.has(key(1))
    assert not holds(second, 1)


@pytest.mark.parametrize(("namespace", "rank"), [(OTHER_NAMESPACE, 0), (NAMESPACE, 1)])
def test_namespaces_and_ranks_are_apart(root, store, namespace, rank):
    write(store, 0)
    other = DirectoryStore(root, MIB, namespace, rank)
    assert not other.has(key(0))
    assert not holds(other, 0)


def test_an_entry_is_written_once(root, store):
    write(store, 0)
    before = place(root, 0).stat()
    store.write(key(0), views(pages(1)))
    assert place(root, 0).stat() == before
    assert holds(store, 0)


def test_only_this_user_can_look(root, store):
    before = os.umask(0)
    try:
        write(store, 0)
    finally:
        os.umask(before)
    inside = list(root.rglob("*"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (root, *inside) if path.is_dir()}
    assert modes == {0o700}
    assert stat.S_IMODE(place(root, 0).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "odd", [b"", b"\0", b"\0" * 32, b"../../x", b"/", b"x" * MAX_KEY_BYTES, b"x" * 97, b"x" * 9999]
)
def test_odd_keys(store, odd):
    fits = 0 < len(odd) <= MAX_KEY_BYTES
    store.write(odd, views(pages(0)))
    assert store.has(odd) == fits
    assert read(store, odd) == (pages(0) if fits else None)


def damage_places() -> st.SearchStrategy[int]:
    """Each byte of the header, and some of the data."""
    header = file_bytes(0)
    return st.one_of(st.integers(0, header - 1), st.integers(header, file_bytes(PAGE) - 1))


@settings(max_examples=examples(100), **OFTEN)
@given(begin=damage_places(), content=st.binary(max_size=PAGE), keeps_end=st.booleans())
@example(begin=0, content=b"", keeps_end=False)
@example(begin=file_bytes(PAGE) - 1, content=b"", keeps_end=False)
@example(begin=file_bytes(PAGE), content=b"x", keeps_end=False)
def test_other_bytes_are_a_miss(root, store, begin, content, keeps_end):
    """Cut short, overwritten, or longer."""
    write(store, 0)
    whole = place(root, 0).read_bytes()
    changed = whole[:begin] + content + keeps_end * whole[begin + len(content) :]
    place(root, 0).write_bytes(changed)
    assert holds(store, 0) == (changed == whole)
    assert store.has(key(0)) == (changed == whole)  # it is not found again
    write(store, 0)
    assert holds(store, 0)


@pytest.mark.parametrize("sizes", [(PAGE - 1,), (PAGE + 1,), (PAGE, PAGE), ()])
def test_another_size_is_a_miss(store, sizes):
    write(store, 0)
    assert read(store, key(0), sizes) is None


@pytest.mark.parametrize(
    ("number", "namespace", "rank"),
    [(1, NAMESPACE, 0), (0, OTHER_NAMESPACE, 0), (0, NAMESPACE, 1)],
    ids=["another key's", "another namespace's", "another rank's"],
)
def test_a_file_in_anothers_place_is_a_miss(root, store, number, namespace, rank):
    write(store, 0)
    write(DirectoryStore(root, MIB, namespace, rank), number)
    shutil.copy(place(root, number, namespace, rank), place(root, 0))
    assert not holds(store, 0)


def test_a_truncated_key_is_another_key(root, store):
    """A header pads its key with zeros: a key may end with some."""
    store.write(b"key", views(pages(0)))
    for longer in (b"key\0", b"key\0\0"):
        target = root / NAMESPACE / "rank0" / longer.hex()[:2] / longer.hex()
        shutil.copy(target.with_name(b"key".hex()), target)
        assert read(store, longer) is None


def replace_with(path: Path, kind: str, outside: Path) -> None:
    """Put something else in the place of a file or directory."""
    original = outside / "original"
    path.rename(original)
    if kind == "symlink":
        path.symlink_to(original)
    elif kind == "dangling":
        path.symlink_to(outside / "nothing")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "directory":
        path.mkdir()
    else:
        shutil.copytree(original, path) if original.is_dir() else shutil.copy(original, path)
        if kind == "foreign":
            os.chown(path, OTHER_USER, -1)
        else:
            path.chmod(path.stat().st_mode | (0o020 if kind == "group" else 0o002))


KINDS = ["symlink", "dangling", "fifo", "socket", "directory", "group", "others"]
FOREIGN = pytest.param("foreign", marks=as_root)


@pytest.mark.parametrize("kind", [*KINDS, FOREIGN])
def test_what_is_no_file_of_ours_is_a_miss(root, store, tmp_path, caplog, kind):
    write(store, 0)
    replace_with(place(root, 0), kind, tmp_path)
    assert not holds(store, 0)
    assert not store.has(key(0))
    write(store, 0)
    assert holds(store, 0) == (kind != "directory")
    assert not warnings(caplog)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("kind", ["symlink", "fifo", "group", FOREIGN])
def test_directories_that_others_could_write_are_not_used(root, tmp_path, caplog, kind, level):
    write(DirectoryStore(root, MIB, NAMESPACE), 0)
    replace_with(place(root, 0).parents[level], kind, tmp_path)
    store = DirectoryStore(root, MIB, NAMESPACE)
    assert not store.has(key(0))
    assert not holds(store, 0)
    write(store, 0)
    assert not holds(store, 0)
    assert len(warnings(caplog)) == 1


def test_home_and_relative_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(DirectoryStore("~/kv", MIB, NAMESPACE), 0)
    assert place(tmp_path / "kv", 0).is_file()
    monkeypatch.chdir(tmp_path)
    relative = DirectoryStore("kv", MIB, NAMESPACE)
    monkeypatch.chdir("/")
    assert holds(relative, 0)


def bad_paths(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    os.mkfifo(tmp_path / "fifo")
    return {
        f"{tmp_path}/file": "must be a directory",
        f"{tmp_path}/fifo": "must be a directory",
        f"{tmp_path}/loop": "must be a directory",
        f"{tmp_path}/file/kv": "make that one first",
        f"{tmp_path}/no/kv": "make that one first",
        f"{tmp_path}/open": "chmod go-w",
        f"{tmp_path}/open/kv": "chmod go-w",
        f"{tmp_path}/zero\0byte": "must be a directory",
        f"{tmp_path}/" + "long" * 100: "must be a directory",
        "~no-such-user/kv": "must be a directory",
        "s3://bucket/kv": "make that one first",
    }


def test_paths_that_cannot_be(tmp_path):
    for path, rule in bad_paths(tmp_path).items():
        with pytest.raises(ConfigError, match="kv_cache_dir") as raised:
            DirectoryStore(path, MIB, NAMESPACE)
        assert rule in str(raised.value), path
        assert "kv_cache_dir '" in str(raised.value)


@contextlib.contextmanager
def no_file_longer_than(num_bytes: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 2000])
def test_a_failed_write_is_one_warning_and_a_pause(root, store, caplog, monkeypatch, num_bytes):
    write(store, 0)
    with no_file_longer_than(num_bytes):
        write(store, 1)
        write(store, 2)
    write(store, 3)  # still in the pause
    assert [holds(store, number) for number in range(4)] == [True, False, False, False]
    assert len(files(root)) == 1
    assert len(warnings(caplog)) == 1
    assert "kv_cache_dir" in caplog.text
    monkeypatch.setattr(store, "_resume", 0.0)
    monkeypatch.setattr(directory, "_PAUSE_SECONDS", 0.0)
    with no_file_longer_than(num_bytes):
        write(store, 1)
        write(store, 2)
    assert len(warnings(caplog)) == 1  # it is the same trouble
    write(store, 3)
    assert holds(store, 3)
    with no_file_longer_than(num_bytes):
        write(store, 4)
    assert len(warnings(caplog)) == 2


@as_root
def test_a_read_only_directory_is_read(tmp_path, caplog):
    with mounted(tmp_path, "size=1m,mode=0700"):
        writer = DirectoryStore(tmp_path, MIB, NAMESPACE)
        write(writer, 0)
        write(writer, 1)
        os.truncate(place(tmp_path, 1), 100)
        remount(tmp_path, "ro")
        store = DirectoryStore(tmp_path, MIB, NAMESPACE)
        assert holds(store, 0)
        assert not warnings(caplog)
        assert store.has(key(1))
        assert not holds(store, 1)
        assert not store.has(key(1))  # it cannot be removed, and is not found again
        write(store, 2)
        write(store, 3)
        assert not holds(store, 2)
        assert len(warnings(caplog)) == 1
        other = DirectoryStore(tmp_path / "new", MIB, NAMESPACE)  # it cannot be made
        write(other, 0)
        assert not other.has(key(0))
        assert "cannot be made" in caplog.text


def test_a_directory_that_is_removed_is_made_again(root, store, caplog):
    write(store, 0)
    shutil.rmtree(root / NAMESPACE)
    assert not store.has(key(0))
    write(store, 1)
    assert holds(store, 1)
    assert not warnings(caplog)
    shutil.rmtree(root)  # a disk that is gone: another would be filled in its place
    write(store, 2)
    assert not root.exists()
    assert len(warnings(caplog)) == 1
