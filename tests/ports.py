"""Ports of this machine that stay a test's own, however many others ask for free ones meanwhile."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_ports(number: int) -> Iterator[list[int]]:
    """Ports to start servers on by number, and to start others on when those have ended.

    What keeps them are sockets that are bound and never listen. A server binds beside them, since
    both say SO_REUSEADDR; and also while none is there, the system gives the ports to nobody who
    takes whichever is free.
    """
    with contextlib.ExitStack() as stack:
        keepers = [stack.enter_context(socket.socket()) for _ in range(number)]
        for keeper in keepers:
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeper.bind(("127.0.0.1", 0))
        yield [keeper.getsockname()[1] for keeper in keepers]
