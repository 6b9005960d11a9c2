"""`DirectoryStore`: entries of the prefix cache as files of a directory, PATH/<namespace>/rank<r>.

A file counts only if nobody but this user could have written it. Several processes may share the
directory. A file has a header, then the bytes of the entry's pages. Except for its checksum, the
header is known before the file is read and compared as a whole: nothing in a file is trusted.

`make_store` makes this store, or the user's.
"""

import contextlib
import errno
import functools
import hashlib
import io
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from nanovllm.errors import ConfigError
from nanovllm.features.tiers.evictor import NAMESPACE, Evictor, new_temporary
from nanovllm.features.tiers.tier import ByteStore
from nanovllm.options.config import Config
from nanovllm.options.plugins import at_start, load_class
from nanovllm.options.validation import shown
from nanovllm.utils.disk_cache import check_directory, check_ours, open_ours
from nanovllm.utils.system import MOVES_OPEN_FILES

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 60.0  # for how long nothing is written after a failure
# What the system may answer although the path is right, or the file may be:
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
MAX_KEY_BYTES = 96  # a key's hexadecimal digits are a file's name, which may have 255 bytes
_MAGIC = b"nanovkv\n"
_VERSION = 1  # raise it when the format of the file changes
_HEADER = struct.Struct(f"<8sII32sQ{MAX_KEY_BYTES}s")
"""Magic, version, length of the key, digest of the owner, bytes of data, key."""
_CHECKSUM_BYTES = 16


class DirectoryStore(ByteStore):
    """Keeps entries of the prefix cache as bytes, longer than a process lives.

    One thread may write while others read. No method raises: an entry that cannot be had is a miss,
    and one that cannot be written is left out.

    Args:
        path: a directory, which is made if only the last part is missing.
        limit_bytes: for the entries of all namespaces and ranks together; those that were not used
            for longest go first.
        namespace: lower-case hexadecimal, 16 to 64 digits: see `kv_namespace`. Entries of other
            namespaces and ranks are never read.

    Raises:
        ConfigError: `path` is not a directory, its parent is missing, or others could write to it.
    """

    def __init__(
        self, path: str | os.PathLike[str], limit_bytes: int, namespace: str, rank: int = 0
    ) -> None:
        assert NAMESPACE.fullmatch(namespace), namespace
        self._root = find_directory(path)
        self._base = str(self._root / namespace / f"rank{rank}")
        self._owner = hashlib.sha256(f"{namespace} {rank}".encode()).digest()
        self._evictor = Evictor(self._root, limit_bytes)
        self._checked: set[str] = set()  # directories that this user alone can change
        self._bad: set[bytes] = set()  # keys whose files are no entries and cannot be removed
        self._resume = 0.0
        self._warned = False

    def has(self, key: bytes) -> bool:
        """Return whether there is an entry, in microseconds; `read` may find it damaged."""
        group, path = self._place(key)
        try:
            if not key or key in self._bad or not self._is_safe(group):
                return False
            return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def read(self, key: bytes, buffers: Seq[memoryview]) -> bool:
        """See `ByteStore`. A damaged file is removed."""
        group, path = self._place(key)
        try:
            if not key or key in self._bad or not self._is_safe(group):
                return False
            fd = open_ours(Path(path))
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _SHORT_OF:
                self._discard(key, path, error)
            return False
        reason: object = "damaged, or not of this key"
        try:
            with open(fd, "rb") as file:
                is_whole = read_file(file, self._owner, key, buffers)
        except OSError as error:
            is_whole, reason = False, error
        if not is_whole:
            self._discard(key, path, reason)
            return False
        with contextlib.suppress(OSError):  # a directory that cannot be written is as good
            _touch(path)
        return True

    def write(self, key: bytes, buffers: Seq[memoryview]) -> None:
        """Keep an entry, if there is room and it is not there. Others see all of it or nothing.
        After a failure nothing is written for a minute.
        """
        fits = 0 < len(key) <= MAX_KEY_BYTES and key not in self._bad
        if not fits or self.has(key) or time.monotonic() < self._resume:
            return
        num_bytes = file_bytes(sum(buffer.nbytes for buffer in buffers))
        if not self._evictor.has_room(num_bytes):
            return
        group, path = self._place(key)
        try:
            self._make(group)
            self._write(path, key, buffers)
        except IsADirectoryError as error:
            self._discard(key, path, error)
        except OSError as error:
            self._fail(error)
        else:
            self._warned = False
            self._evictor.added(num_bytes)

    def settle(self) -> None:
        """Wait until as many entries are removed as the limit asks for."""
        self._evictor.settle()

    def close(self) -> None:
        """Let the store go. Entries stay."""
        self._evictor.close()

    def _place(self, key: bytes) -> tuple[str, str]:
        """Return the directory of a key's file, and the file."""
        name = key.hex()
        group = f"{self._base}/{name[:2]}"
        return group, f"{group}/{name}"

    def _is_safe(self, group: str) -> bool:
        """Return whether this user alone can write to `group` and the directories above it.

        Raises:
            OSError: it is missing.
        """
        if group in self._checked:
            return True
        for path in (os.path.dirname(self._base), self._base, group):
            try:
                status = os.lstat(path)
                if not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(f"{path} is no directory")
                check_ours(Path(path), status)
            except FileNotFoundError:
                raise
            except OSError as reason:
                self._fail(reason)
                return False
        self._checked.add(group)
        return True

    def _make(self, group: str) -> None:
        """Make `group` and the two directories above it, if they are missing.

        Raises:
            OSError: this cannot be, or others could write to one of them.
        """
        for path in (os.path.dirname(self._base), self._base, group):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode=0o700)
        if not self._is_safe(group):
            raise PermissionError(f"{group} is not safe")

    def _write(self, path: str, key: bytes, buffers: Seq[memoryview]) -> None:
        """Write a file next to the groups, and move it to `path`. Its bytes may reach the disk
        late: what a power failure leaves of it does not match its checksum.
        """
        fd, temporary = new_temporary(self._base)
        try:
            with open(fd, "wb") as file:
                write_file(file, self._owner, key, buffers)
                file.flush()
                _touch(temporary)
                if MOVES_OPEN_FILES:  # it is locked until it is closed
                    os.replace(temporary, path)
            if not MOVES_OPEN_FILES:
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _discard(self, key: bytes, path: str, reason: object) -> None:
        """Remove a file that cannot be used, so that it is found no more."""
        logger.info("an entry of the KV cache is not used: %s: %s", path, reason)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError:
            self._bad.add(key)

    def _fail(self, reason: OSError) -> None:
        """Write nothing for a while; warn once, until a write succeeds."""
        self._resume = time.monotonic() + _PAUSE_SECONDS
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        logger.log(level, "kv_cache_dir %s: no KV is written for now: %s", self._root, reason)


def find_directory(path: str | os.PathLike[str]) -> Path:
    """Return directory `path` as an absolute path without symlinks; make it if its parent exists.

    A directory that cannot be made, because the disk is full or read-only, counts as empty.

    Raises:
        ConfigError: it cannot be a directory of this user's alone.
    """
    name = f"kv_cache_dir {shown(os.fspath(path))}"
    try:
        directory = Path(path).expanduser().absolute()
        directory.parent.resolve(strict=True)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            _warn_not_made(directory, str(error))
    except (OSError, RuntimeError, ValueError) as error:  # missing, no such user, a zero byte
        raise ConfigError(
            f"{name} must be a directory, or a new name in one: make that one first, or name "
            f"another ({error!s:.200})"
        ) from error
    if not os.path.isdir(directory):
        return directory
    try:
        directory = directory.resolve(strict=True)
        check_directory(directory)
    except OSError as error:
        raise ConfigError(
            f"{name} must be a directory that others can neither write to nor replace: {error}"
        ) from error
    return directory


@functools.cache
def _warn_not_made(directory: Path, reason: str) -> None:
    """Warn once: an engine opens its directory several times."""
    logger.warning("kv_cache_dir %s cannot be made, no KV is kept: %s", directory, reason)


def file_bytes(num_bytes: int) -> int:
    """Return the size of a file with `num_bytes` of data."""
    return _HEADER.size + _CHECKSUM_BYTES + num_bytes


def _touch(path: str) -> None:
    """Let a file be one that was used just now."""
    now = time.time_ns()  # the system's own time of a file may be 10 ms old
    os.utime(path, ns=(now, now))


def read_file(file: io.BufferedReader, owner: bytes, key: bytes, buffers: Seq[memoryview]) -> bool:
    """Fill `buffers` from a file of `owner` (32 bytes) and `key`; return whether it is whole."""
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    if os.fstat(file.fileno()).st_size != file_bytes(num_bytes):
        return False
    found = file.read(_HEADER.size + _CHECKSUM_BYTES)
    if any(file.readinto(buffer) < buffer.nbytes for buffer in buffers):
        return False
    return found == _header(owner, key, num_bytes) + _checksum(buffers)


def write_file(file: io.BufferedWriter, owner: bytes, key: bytes, buffers: Seq[memoryview]) -> None:
    """Write a new file, as `read_file` reads it.

    Raises:
        OSError: the disk is full or fails.
    """
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    file.write(_header(owner, key, num_bytes) + _checksum(buffers))
    for buffer in buffers:
        file.write(buffer)


def _header(owner: bytes, key: bytes, num_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, len(key), owner, num_bytes, key)


def _checksum(buffers: Seq[memoryview]) -> bytes:
    digest = xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


class CheckedStore(ByteStore):
    """A store of the user's: what it raises is logged, once, and counts as a miss."""

    def __init__(self, store: ByteStore, name: str) -> None:
        self._store = store
        self._name = name
        self._warned = False

    def has(self, key: bytes) -> bool:
        return bool(self._asked("has()", self._store.has, key))

    def read(self, key: bytes, buffers: Seq[memoryview]) -> bool:
        return bool(self._asked("read()", self._store.read, key, buffers))

    def write(self, key: bytes, buffers: Seq[memoryview]) -> None:
        self._asked("write()", self._store.write, key, buffers)

    def close(self) -> None:
        self._asked("close()", self._store.close)

    def _asked(self, call: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except (Exception, SystemExit) as error:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            reason = f"{call} raised {type(error).__name__}: {error}"
            logger.log(level, "%s: %s; what it should give is computed", self._name, reason)
            return None


def store_class(value: str) -> type[ByteStore]:
    """Return the class that the option kv_store names, "module:Class".

    Raises:
        ConfigError: there is no such class.
    """
    return load_class("kv_store", value, ByteStore, ("namespace", "rank"))  # type: ignore[type-abstract]


def make_store(config: Config, namespace: str, rank: int = 0) -> ByteStore | None:
    """Return the store that the options ask for; None for none.

    Args:
        namespace: see `kv_namespace`.

    Raises:
        ConfigError: it cannot be made.
    """
    if config.kv_store is not None:
        name = f'kv_store="{config.kv_store}"'
        found = store_class(config.kv_store)
        return CheckedStore(at_start(name, "__init__()", found, namespace, rank), name)
    if config.kv_cache_dir is not None:
        limit = int(config.kv_cache_dir_gib * 2**30)
        return DirectoryStore(config.kv_cache_dir, limit, namespace, rank)
    return None
