"""Which server gets the next request: pure, (servers, last choice) -> choice."""

from collections.abc import Callable, Sequence
from typing import TypeVar

ServerT = TypeVar("ServerT")


def choose(
    servers: Sequence[ServerT],
    last: ServerT | None,
    *,
    ready: Callable[[ServerT], bool],
    admits: Callable[[ServerT], bool],
) -> ServerT | None:
    """Round robin over ready servers whose circuit admits a request, else over all ready ones: the
    first after `last` in the circle of `servers`, `last` itself at the end."""
    start = servers.index(last) + 1 if last in servers else 0
    usable = [server for server in (*servers[start:], *servers[:start]) if ready(server)]
    return next((server for server in (*filter(admits, usable), *usable)), None)
