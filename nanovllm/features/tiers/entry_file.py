"""The file of one entry: a header, then the bytes of its pages.

Except for its checksum, the header is known before the file is read: it is compared as a whole, so
nothing in a file is trusted.
"""

import os
import struct
from collections.abc import Callable, Sequence as Seq

from xxhash import xxh3_128

MAX_KEY_BYTES = 96
"""A key's hexadecimal digits are a file's name, which may have 255 bytes."""
_MAGIC = b"nanovkv\n"
_VERSION = 1
"""Raise it when the format of the file changes."""
_HEADER = struct.Struct(f"<8sII32sQ{MAX_KEY_BYTES}s")
"""Magic, version, length of the key, digest of the owner, bytes of data, key."""
_CHECKSUM_BYTES = 16
_IOV_MAX = 1024
"""Most buffers of one call, in Linux and macOS."""


def file_bytes(num_bytes: int) -> int:
    """Return the size of a file with `num_bytes` of data."""
    return _HEADER.size + _CHECKSUM_BYTES + num_bytes


def read_file(fd: int, owner: bytes, key: bytes, buffers: Seq[memoryview]) -> bool:
    """Fill `buffers` from a file of `owner` (32 bytes) and `key`; return whether it is whole.

    Raises:
        OSError: the disk fails.
    """
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    if os.fstat(fd).st_size != file_bytes(num_bytes):
        return False
    found = bytearray(_HEADER.size + _CHECKSUM_BYTES)
    if not _transfer(os.preadv, fd, [memoryview(found), *buffers]):
        return False
    return found == _header(owner, key, num_bytes) + _checksum(buffers)


def write_file(fd: int, owner: bytes, key: bytes, buffers: Seq[memoryview]) -> None:
    """Write a new file, as `read_file` reads it.

    Raises:
        OSError: the disk is full or fails.
    """
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    header = _header(owner, key, num_bytes) + _checksum(buffers)
    if not _transfer(os.pwritev, fd, [memoryview(header), *buffers]):
        raise OSError("the system writes no more bytes")


def _header(owner: bytes, key: bytes, num_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, len(key), owner, num_bytes, key)


def _checksum(buffers: Seq[memoryview]) -> bytes:
    digest = xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _transfer(
    call: Callable[[int, Seq[memoryview], int], int], fd: int, buffers: Seq[memoryview]
) -> bool:
    """Read or write all of `buffers` from the file's start; False if the system stops before."""
    rest = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    offset = 0
    while rest:
        count = call(fd, rest[:_IOV_MAX], offset)
        if count <= 0:
            return False
        offset += count
        while rest and count >= rest[0].nbytes:
            count -= rest.pop(0).nbytes
        if count:
            rest[0] = rest[0][count:]
    return True
