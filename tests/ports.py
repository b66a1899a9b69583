"""Ports of this machine that stay reserved for one test.

Other processes that ask the system for a free port do not get them.
"""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(number: int) -> Iterator[list[int]]:
    """Reserve ports on which a test can start servers, and start them again.

    Each port is held by a socket that is bound and never listens. A server can bind to
    the same port, because both sockets set SO_REUSEADDR. While no server runs, the
    system does not hand out the port as a free one.
    """
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(number)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        yield [holder.getsockname()[1] for holder in holders]
