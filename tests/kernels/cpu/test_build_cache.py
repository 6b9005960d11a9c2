"""The cache of compiled kernels: damaged files, files and directories of others, no place for it.

A fake compiler copies the library that this process uses, so a build takes milliseconds.
"""

import logging
import os
import pwd
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm.kernels.cpu import build
from nanovllm.kernels.cpu.library import library
from nanovllm.utils import disk_cache
from tests.kernels.cpu.helpers import built_library, compiled, fake_compiler, native, num_links

pytestmark = native
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")

OTHER_USER = 12345


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> str:
    found = fake_compiler(tmp_path / "compiler")
    monkeypatch.setenv("CC", found)
    return found


@pytest.fixture
def cached(cache, compiler) -> Path:
    """The file of a library that was built and stored."""
    build.load()
    (file,) = cache.iterdir()
    return file


def foreign(directory: Path) -> bytes:
    return compiled(directory, "int nothing_of_ours;")


def wrong(directory: Path) -> bytes:
    """Return a library that has every kernel; none does anything."""
    kernels = "void nv_run(void) {}"
    return compiled(directory, kernels + "int nv_enable(void) { return 1; }")


def replace(file: Path, content: bytes, *, sealed: bool) -> None:
    """Put another file in the place of `file`, which is in use, with or without a digest."""
    file.unlink()
    file.write_bytes(content)
    file.chmod(0o600)
    if sealed:
        disk_cache.seal(file)


def planted(file: Path, marker: Path) -> None:
    """Replace `file` by a library that writes `marker` when it is loaded."""
    code = f'__attribute__((constructor)) void run(void) {{ fclose(fopen("{marker}", "w")); }}'
    content = compiled(marker.parent, f"#include <stdio.h>\n{code}")
    replace(file, content, sealed=True)


def assert_rebuilt(cached: Path, compiler: str) -> None:
    """Check that the next load builds the file again, once, and leaves nothing else."""
    build.load()
    assert num_links(compiler) == 2
    disk_cache.check_file(cached)
    assert cached.read_bytes().startswith(built_library())
    assert [*cached.parent.iterdir()] == [cached]


@pytest.mark.parametrize("make", [foreign, wrong])
def test_a_compiler_that_makes_no_library_of_ours(cache, tmp_path, monkeypatch, caplog, make):
    """It is called once, nothing is stored, and the log says that kernels are compiled, which may
    take 100 seconds, and why torch serves.
    """
    compiler = fake_compiler(tmp_path / "compiler", make(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert library() is None
    assert num_links(compiler) == 1
    said, why = (record.getMessage() for record in caplog.records if record.levelno > logging.INFO)
    assert said == f"{build.COMPILING}, once"
    assert "torch serves" in why
    assert "has no nv_" in why or "wrong products" in why
    assert [*cache.iterdir()] == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1],
        lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
        lambda whole: whole + b"x",
    ],
    ids=["empty", "half", "a byte short", "a bit changed", "a byte more"],
)
def test_a_damaged_file_is_built_again(cached, compiler, warnings, damage):
    """Symptom: a bus error at every start, until the cache was emptied."""
    replace(cached, damage(cached.read_bytes()), sealed=False)
    assert_rebuilt(cached, compiler)
    build.load()
    assert num_links(compiler) == 2, "the new file is not used"
    assert warnings() == []


@pytest.mark.parametrize("make", [foreign, wrong, lambda directory: b"text"])
def test_a_whole_file_that_is_no_library_of_ours_is_built_again(cached, compiler, tmp_path, make):
    """Symptom: a raw AttributeError, or slow torch for ever."""
    replace(cached, make(tmp_path), sealed=True)
    assert_rebuilt(cached, compiler)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_something_that_is_no_file_is_replaced(cached, compiler, make):
    cached.unlink()
    make(cached)
    assert_rebuilt(cached, compiler)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("place", ["full at the end", "full", "noexec"])
def test_a_cache_that_cannot_be_used(
    place, everywhere, cache, compiler, monkeypatch, warnings, tmp_path
):
    """Symptom: torch serves, slower and with other sums, although TMPDIR would do."""
    root = "" if everywhere else str(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")

    def fail(path: str) -> None:
        if str(path).startswith(root):
            raise OSError(28, "No space left on device")

    write, sync, status = Path.write_bytes, os.fsync, os.statvfs
    if place == "full at the end":
        monkeypatch.setattr(
            os, "fsync", lambda fd: (fail(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))
        )
    elif place == "full":
        monkeypatch.setattr(
            Path, "write_bytes", lambda path, found: (fail(str(path)), write(path, found))
        )
    else:
        found = SimpleNamespace(f_flag=os.ST_NOEXEC)
        monkeypatch.setattr(
            os, "statvfs", lambda path: found if path.startswith(root) else status(path)
        )
    assert (library() is None) == everywhere
    said = warnings()
    reason = "mounted noexec" if place == "noexec" else "No space left on device"
    assert "each start compiles the kernels" in said[0]
    assert all(reason in warning for warning in said)
    assert len(said) == 1 + everywhere
    assert [*cache.iterdir()] == []


def test_two_builds_at_once_both_end_well(cache, tmp_path, monkeypatch):
    """Each compiler waits until the other's build has begun."""
    wait = f"while [ $(ls {cache} | wc -l) -lt 2 ] && [ ! -e {cache}/*.so ]; do sleep 0.01; done"
    compiler = fake_compiler(tmp_path / "compiler", first=wait)
    monkeypatch.setenv("CC", compiler)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(build.load), pool.submit(build.load)
        assert first.result(60).nv_enable() == second.result(60).nv_enable() == 1
    assert num_links(compiler) == 2
    (file,) = cache.iterdir()
    disk_cache.check_file(file)
    assert file.stat().st_mode & 0o777 == 0o600


# Others


def test_a_directory_that_others_can_write_to_is_not_used(cached, compiler, tmp_path, warnings):
    """Symptom: planted code ran."""
    planted(cached, tmp_path / "marker")
    before = cached.read_bytes()
    cached.parent.chmod(0o777)
    assert library() is not None
    assert not (tmp_path / "marker").exists()
    (warning,) = warnings()
    assert f"chmod go-w {cached.parent}" in warning
    assert cached.read_bytes() == before
    assert [*cached.parent.iterdir()] == [cached]


@pytest.mark.parametrize(
    "expose",
    [
        lambda file: file.chmod(0o620),
        lambda file: file.chmod(0o602),
        pytest.param(lambda file: os.chown(file, OTHER_USER, OTHER_USER), marks=as_root),
    ],
    ids=["group", "others", "owner"],
)
def test_a_file_that_others_could_have_written_is_replaced(
    cached, compiler, tmp_path, warnings, expose
):
    planted(cached, tmp_path / "marker")
    expose(cached)
    assert_rebuilt(cached, compiler)
    assert not (tmp_path / "marker").exists()
    (warning,) = warnings()
    assert str(cached) in warning


@pytest.mark.parametrize(
    ("mode", "safe"), [(0o755, True), (0o1777, True), (0o777, False), (0o775, False)]
)
def test_others_must_not_rename_the_directory(tmp_path, monkeypatch, mode, safe):
    monkeypatch.setattr(disk_cache, "_is_private", lambda gid: False)
    directory = tmp_path / "parent" / "nanovllm"
    directory.mkdir(parents=True, mode=0o700)
    directory.parent.chmod(mode)
    if safe:
        disk_cache.check_directory(directory)
    else:
        with pytest.raises(PermissionError, match=f"chmod go-w {directory.parent}$"):
            disk_cache.check_directory(directory)


@as_root
def test_the_owner_of_a_directory_above_is_this_user_or_root(tmp_path):
    directory = tmp_path / "parent" / "nanovllm"
    directory.mkdir(parents=True, mode=0o700)
    os.chown(directory.parent, OTHER_USER, OTHER_USER)
    with pytest.raises(PermissionError, match=f"parent belongs to user {OTHER_USER}"):
        disk_cache.check_directory(directory)


def test_a_private_group_may_write_above_the_directory_and_not_in_it(tmp_path, monkeypatch):
    """Where each user has a group, such as "ann", ~/.cache is often writable by this group."""
    monkeypatch.setattr(disk_cache, "_is_private", lambda gid: True)
    directory = tmp_path / "parent" / "nanovllm"
    directory.mkdir(parents=True, mode=0o700)
    directory.parent.chmod(0o775)
    disk_cache.check_directory(directory)
    directory.chmod(0o770)
    with pytest.raises(PermissionError, match="chmod go-w"):
        disk_cache.check_directory(directory)


@pytest.mark.parametrize(
    ("name", "members", "private"),
    [("ann", [], True), ("ann", ["ann"], True), ("ann", ["bob"], False), ("users", [], False)],
)
def test_a_private_group_has_the_users_name_and_no_other_member(
    monkeypatch, name, members, private
):
    user = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/home/ann", "/bin/sh"))
    monkeypatch.setattr("pwd.getpwuid", lambda uid: user)
    monkeypatch.setattr("grp.getgrgid", lambda gid: build_group(name, members))
    assert disk_cache._is_private(1000) is private


def build_group(name: str, members: list[str]):
    import grp

    return grp.struct_group((name, "x", 1000, members))


def test_a_link_is_followed_once_and_what_it_names_is_checked(cache, compiler, tmp_path, warnings):
    """~/.cache may be a link to another disk."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cache.parent.symlink_to(elsewhere)
    assert disk_cache.cache_directory() == elsewhere / "nanovllm"
    elsewhere.chmod(0o777)
    assert disk_cache.cache_directory() is None
    (warning,) = warnings()
    assert f"chmod go-w {elsewhere}" in warning


# No place for it


@pytest.mark.usefixtures("cache", "compiler")
def test_a_cache_that_cannot_be_made_costs_only_time(monkeypatch, tmp_path, warnings):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    assert library() is not None
    (warning,) = warnings()
    assert "/dev/null/nanovllm is not used" in warning
    assert sorted(tmp_path.iterdir()) == before, "the private directory is left"


def test_a_user_without_a_home_has_no_cache(monkeypatch, warnings):
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert disk_cache.cache_directory() is None
    assert len(warnings()) == 1


def test_a_relative_xdg_cache_home_is_ignored(monkeypatch, tmp_path):
    """The XDG base directory specification says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.cache_directory() == tmp_path / ".cache" / "nanovllm"


def test_a_cache_that_cannot_be_written_costs_only_time(warnings):
    with disk_cache.new_directory(Path("/proc")) as directory:
        assert Path(directory).stat().st_mode & 0o777 == 0o700
    (warning,) = warnings()
    assert "/proc is not used" in warning


@pytest.mark.usefixtures("cache", "compiler")
def test_no_safe_place_at_all_leaves_torch(monkeypatch, tmp_path, caplog):
    unsafe = tmp_path / "unsafe"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(unsafe))
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert f"chmod go-w {unsafe}" in caplog.text
    assert [*unsafe.iterdir()] == []
