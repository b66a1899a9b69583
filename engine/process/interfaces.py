"""Finds the network interface that has a given address."""

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # the ioctl that returns an interface's IPv4 address


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this address, or None."""
    if ":" in address:
        return _ipv6_interface_of(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


def _ipv6_interface_of(address: str) -> str | None:
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    names = [line.split()[-1] for line in lines if line.split()[0] == packed]
    return names[0] if names else None
