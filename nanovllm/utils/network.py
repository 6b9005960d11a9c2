"""This machine's network interfaces. Opens no connection."""

import contextlib
import fcntl
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address, in a struct ifreq: 16 bytes of its name, then a
sockaddr_in, whose address is at byte 4."""


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has the IPv4 `address`, such as "eth0".

    None if no interface has it as its first address, or where the system is neither Linux nor, for
    127.0.0.1, macOS.
    """
    if sys.platform == "darwin":
        return "lo0" if address == "127.0.0.1" else None
    if sys.platform != "linux" or ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
