"""Keeps files between processes: finds a directory and checks what is in it.

A file counts only if nobody but this user could have written it, and if it is whole.
"""

import hashlib
import logging
import os
import stat
import sys
import tempfile
from pathlib import Path

from nanovllm.utils.system import HAS_OWNERS, READ_PRIVATE, check_home

logger = logging.getLogger(__name__)

_DIGEST = "sha256"
_DIGEST_BYTES = 32
"""A stored file ends with the digest of what precedes it. The dynamic loader ignores such bytes."""
_ROOTS = (0, 65534)
"""root, and what the host's root is called within a user namespace that lacks it."""


def cache_directory(*, warn: bool = True) -> Path | None:
    """Return the directory of kept files, made if needed; None if there is no safe one.

    It is $XDG_CACHE_HOME/nanovllm, or ~/.cache/nanovllm. A warning in the log says why it is None.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    path: Path | str = "the kernels' cache"
    try:
        path = Path(root if os.path.isabs(root) else Path.home() / ".cache", "nanovllm")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(exist_ok=True, mode=0o700)
        resolved = path.resolve(strict=True)
        check_directory(resolved)
    except (OSError, RuntimeError) as reason:  # RuntimeError: this user has no home
        if warn:
            warn_not_kept(path, reason)
        return None
    return resolved


def state_directory() -> Path | None:
    """Return where files lie that a user would miss, such as a history; None without a home.

    It is $XDG_STATE_HOME/nanovllm, or ~/.local/state/nanovllm, and may not exist yet.
    """
    root = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.expanduser("~/.local/state")
    return Path(root, "nanovllm") if os.path.isabs(root) else None


def new_directory(cache: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Return an empty directory of this user's: in `cache`, or else where temporary files lie.

    Raises:
        OSError: there is no place for one that others cannot change.
    """
    if cache is not None:
        try:
            return tempfile.TemporaryDirectory(prefix="build-", dir=cache)
        except OSError as reason:  # read-only, full
            warn_not_kept(cache, reason)
    root = Path(tempfile.gettempdir()).resolve()
    _check_path(root)
    return tempfile.TemporaryDirectory(prefix="nanovllm-", dir=root)


def check_directory(directory: Path) -> None:
    """Raise PermissionError if others could change a file in `directory`, or what its path names.

    Args:
        directory: an absolute path without symlinks.
    """
    _check_path(directory.parent if HAS_OWNERS else directory)
    check_ours(directory, _lstat(directory))


def check_ours(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError if `path` is another user's or others can write to it."""
    if sys.platform == "win32":  # `check_directory` has seen where it lies
        return
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not {os.geteuid()}")
    _check_writers(path, status)


def check_file(path: Path) -> bytes:
    """Check that `path`, in a directory that passed `check_directory`, is what `seal` left.

    Returns its content without the digest.

    Raises:
        PermissionError: others could have written it.
        ValueError: it is damaged.
        OSError: it is missing, no file, or cannot be read.
    """
    with open(open_ours(path), "rb") as file:
        content = memoryview(file.read())
    digest = hashlib.new(_DIGEST, content[:-_DIGEST_BYTES]).digest()
    if digest != content[-_DIGEST_BYTES:]:
        raise ValueError(f"{path} is damaged")
    return bytes(content[:-_DIGEST_BYTES])


def open_ours(path: Path) -> int:
    """Return a descriptor of `path`, to read; the caller closes it.

    Raises:
        FileNotFoundError: there is nothing.
        PermissionError: others could have written it.
        OSError: it cannot be opened, or is not a regular file.
    """
    fd = os.open(path, READ_PRIVATE)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        check_ours(path, status)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(path: Path) -> None:
    """Append the digest to a new file, make it private and write it to the disk."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(hashlib.file_digest(file, _DIGEST).digest())
        file.flush()
        os.fsync(file.fileno())


def store(path: Path, cache: Path | None) -> None:
    """Move a sealed file from `new_directory(cache)` into `cache`, if that is where it lies.

    Another process may do the same at the same time: one of the two files stays, and it is whole.
    """
    if cache is not None and path.is_relative_to(cache):
        path.replace(cache / path.name)


def _check_path(directory: Path) -> None:
    """Raise PermissionError if others could rename or replace what lies in `directory`."""
    if sys.platform == "win32":
        check_home(directory)
        return
    # From the root down: once a directory is safe, nobody else can replace the next one.
    for path in (*reversed(directory.parents), directory):
        status = _lstat(path)
        if status.st_uid not in (os.geteuid(), *_ROOTS):
            raise PermissionError(f"{path} belongs to user {status.st_uid}, who could replace it")
        if not status.st_mode & stat.S_ISVTX:  # sticky, as /tmp: only its owner renames an entry
            _check_writers(path, status, private_group=True)


def _lstat(directory: Path) -> os.stat_result:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{directory} was replaced by something that is no directory")
    return status


def _check_writers(path: Path, status: os.stat_result, *, private_group: bool = False) -> None:
    """Raise PermissionError if more than the owner may write.

    Args:
        private_group: allow this user's own group, which has no other members.
    """
    writers = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writers == stat.S_IWGRP and private_group and _is_private(status.st_gid):
        return
    if writers:
        raise PermissionError(f"others can write to {path}; chmod go-w {path}")


def _is_private(gid: int) -> bool:
    """Return whether a group has this user's name and no other member, as on many systems."""
    if sys.platform == "win32":
        return False
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def warn_not_kept(cache: Path | str, reason: Exception) -> None:
    """Log why nothing is kept in `cache`."""
    logger.warning("%s is not used, each start compiles the kernels: %s", cache, reason)
