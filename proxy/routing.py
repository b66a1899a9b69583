"""Which servers may get the next request: pure, (servers, last choice) -> choices."""

from collections.abc import Callable, Sequence
from typing import TypeVar

ServerT = TypeVar("ServerT")


def usable(
    servers: Sequence[ServerT],
    last: ServerT | None,
    *,
    ready: Callable[[ServerT], bool],
    admits: Callable[[ServerT], bool],
) -> list[ServerT]:
    """Ready servers whose circuit admits a request, else all ready ones, in turn: from the one
    after `last` in the circle of `servers` on, `last` itself at the end."""
    start = servers.index(last) + 1 if last in servers else 0
    found = [server for server in (*servers[start:], *servers[:start]) if ready(server)]
    return list(filter(admits, found)) or found
