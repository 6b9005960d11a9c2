"""What Linux, macOS and Windows do differently. The rest asks here, or says at its place why not.

Imports no torch, and psutil only where the system's own files do not say.
"""

import contextlib
import errno
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

UNIX_SOCKETS: int | None = getattr(socket, "AF_UNIX", None)
"""The family of Unix sockets; None where Python has none."""
HAS_OWNERS = sys.platform != "win32"
"""Whether a file's status says who owns it and who may write to it."""
MOVES_OPEN_FILES = sys.platform != "win32"
"""Whether an open file can be renamed, replaced and removed."""
READS_EARLY = hasattr(os, "posix_fadvise")
"""Whether the system can be asked to read a file before it is used."""
if sys.platform == "win32":
    READ_PRIVATE = os.O_RDONLY | os.O_BINARY
    WRITE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_BINARY
else:
    READ_PRIVATE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # FIFOs hang
    WRITE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_THREAD_PRIORITY = 10
_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address, in a struct ifreq: 16 bytes of its name, then a
sockaddr_in, whose address is at byte 4."""


def physical_memory() -> int:
    """Return the bytes of memory of this machine."""
    if sys.platform != "linux":
        import psutil

        return int(psutil.virtual_memory().total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Return the bytes that this machine can still give; without /proc, half of its memory."""
    if sys.platform != "linux":
        import psutil

        return int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return physical_memory() // 2


def resident_memory() -> int:
    """Return the bytes that this process has in memory now; 0 where the system does not say."""
    if sys.platform != "linux":
        import psutil

        return int(psutil.Process().memory_info().rss)
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def anonymous_memory(size: int) -> mmap.mmap:
    """Return `size` bytes of zeros, in huge pages if the system grants them.

    The system allocates a page when it is first written.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def return_memory(memory: mmap.mmap, start: int, size: int) -> None:
    """Give pages of `memory` back to the system; Windows takes them only with the whole."""
    if sys.platform != "win32":
        memory.madvise(mmap.MADV_DONTNEED, start, size)


def lower_thread_priority() -> None:
    """Let this thread give way to others. Only Linux has a priority for each thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_PRIORITY)


def read_early(file: int, start: int, size: int) -> None:
    """Ask the system to read a part of an open file, if `READS_EARLY`."""
    if sys.platform == "linux":
        os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)


def lock_file(file: int) -> None:
    """Lock an open file for this process, until it closes it or dies.

    Windows needs no lock: there nobody can remove a file that is open.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: it lies in a file system without locks.
    """
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_noexec(directory: str) -> bool:
    """Return whether the system refuses to run, or to load as code, what lies in `directory`."""
    if sys.platform == "win32":
        return False
    return bool(os.statvfs(directory).f_flag & getattr(os, "ST_NOEXEC", 0))


def own_session() -> dict[str, Any]:
    """Return the options of `subprocess` for a process that Ctrl-C in the terminal is not for."""
    if sys.platform == "win32":
        import subprocess

        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def kill_group(pid: int) -> None:
    """End a process with `own_session`, and what it started if the system keeps such groups.

    Raises:
        OSError: there is none.
    """
    if sys.platform == "win32":
        os.kill(pid, signal.SIGTERM)  # TerminateProcess: it cannot be refused
    else:
        os.killpg(pid, signal.SIGKILL)


def allow_files(number: int) -> None:
    """Let the process open this many files, as far as the system allows and has a limit."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < number:
            most = number if hard == resource.RLIM_INFINITY else min(number, hard)
            with contextlib.suppress(ValueError, OSError):  # macOS has a second limit
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def unix_socket() -> socket.socket:
    """Return a new Unix socket.

    Raises:
        OSError: Python has none on this system.
    """
    if UNIX_SOCKETS is None:
        raise OSError(errno.EAFNOSUPPORT, "Python has no Unix sockets on Windows")
    return socket.socket(UNIX_SOCKETS)


def nameless_file() -> IO[bytes]:
    """Return an empty file to write and read, in memory if possible, which goes with this process.

    Except on Windows, `/dev/fd/<its number>` names it.
    """
    if sys.platform != "linux":
        return tempfile.TemporaryFile()
    return open(os.memfd_create("nameless"), "w+b")


def has_left(client: socket.socket) -> bool:
    """Return whether the other end is closed although it has sent more than was read. Others than
    Linux say so only when all is read.
    """
    if sys.platform != "linux":
        return False
    poll = select.poll()
    poll.register(client.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def num_unsent(client: socket.socket) -> int:
    """Return the bytes that the system holds for the other end; 0 where it does not say."""
    held = bytearray(4)
    if sys.platform == "linux":
        import fcntl
        import termios

        with contextlib.suppress(OSError):
            fcntl.ioctl(client, termios.TIOCOUTQ, held)
    return int.from_bytes(held, sys.byteorder)


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has the IPv4 `address`, such as "eth0".

    None if no interface has it as its first address, or where the system is neither Linux nor, for
    127.0.0.1, macOS.
    """
    if sys.platform == "darwin":
        return "lo0" if address == "127.0.0.1" else None
    if sys.platform != "linux" or ":" in address:
        return None
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def check_home(directory: Path) -> None:
    """Raise PermissionError if `directory` is not in this user's, whose access rights it inherits.

    For Windows, where a file's mode says nothing of other users.
    """
    home = Path.home().resolve()
    if not directory.is_relative_to(home):
        raise PermissionError(
            f"{directory} is not in {home}, which Windows keeps from other users; name a directory "
            "there"
        )
