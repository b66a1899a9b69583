"""Reserves ports of this machine for a test.

While a port is reserved, the kernel does not assign it to a process that requests any
free port.
"""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(number: int) -> Iterator[list[int]]:
    """Reserve ports on which a test can start servers, and restart them.

    Each port is reserved by a socket that is bound but never listens. A server can bind
    to the same port, because both sockets set SO_REUSEADDR. Even while no server is
    running, the kernel does not assign the port as a free one.
    """
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(number)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        yield [holder.getsockname()[1] for holder in holders]
