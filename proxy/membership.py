"""The servers behind the proxy and what is known of each. Does no I/O."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from proxy import health, routing
from proxy.health import Health, HealthPolicy, Room
from proxy.retry import Kind


@dataclass(frozen=True)
class Server:
    """One server. Clients are told its name; its URL is for the log alone.

    Args:
        index: its place among those of its kind, as the operator gave them.
    """

    kind: Kind
    url: str
    index: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        return f"{self.kind.value}-{self.index}"

    @property
    def labels(self) -> dict[str, str]:
        """Of its metrics."""
        return {"role": self.kind.value, "server": self.name}

    def __str__(self) -> str:
        return f"{self.name} {self.url}"


class Fleet:
    """All servers, in the order in which they joined.

    Args:
        on_change: called with (server, old, new) when a server becomes ready or stops being so, and
            when the reason why it is not ready is another.
        on_silence: called with (server, whether that is a `long_silence`) at each health check
            without an answer, once they have made a server not ready.
    """

    def __init__(
        self,
        *,
        policy: HealthPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[Server, Health, Health], None] | None = None,
        on_silence: Callable[[Server, bool], None] | None = None,
    ) -> None:
        self._policy = policy or HealthPolicy()
        self._clock = clock
        self._on_change = on_change or (lambda _server, _old, _new: None)
        self._on_silence = on_silence or (lambda _server, _is_long: None)
        self._health: dict[Server, Health] = {}
        self._last: dict[tuple[Kind, str], str] = {}

    def join(self, server: Server) -> None:
        """Adds a server, not ready until a health check says so."""
        self._health.setdefault(server, Health())

    def leave(self, server: Server) -> None:
        """Removes a server; requests that it has go on."""
        self._health.pop(server, None)

    def servers(self, kind: Kind | None = None) -> list[Server]:
        return [server for server in self._health if kind in (None, server.kind)]

    def health(self, server: Server) -> Health:
        return self._health.get(server, Health(reason="left"))

    def num_ready(self, kind: Kind, exclude: Collection[Server] = ()) -> int:
        return sum(self._health[s].ready for s in self.servers(kind) if s not in exclude)

    def choose(
        self, kind: Kind, exclude: Collection[Server] = (), rotation: str = ""
    ) -> Server | None:
        """The server for the next request of this kind; None when no other is ready.

        Args:
            rotation: of requests that are alike. Each has its turns for itself: with one for all,
                a client that asks in a rhythm would give one server all of its long requests.
        """
        now = self._clock()
        servers = {server.url: server for server in self.servers(kind)}
        known = {url: self._health[s] for url, s in servers.items() if s not in exclude}
        url = routing.choose(
            list(servers),
            self._last.get((kind, rotation)),
            ready=lambda url: url in known and known[url].ready,
            admits=lambda url: url in known and health.admits(known[url], now),
        )
        if url is None:
            return None
        self._last[kind, rotation] = url
        self._set(servers[url], health.began(known[url], now, self._policy))
        return servers[url]

    def context(self, kind: Kind) -> int | None:
        """The longest context of the ready servers of a kind; None unless all have said theirs."""
        ready = [self._health[s] for s in self.servers(kind) if self._health[s].ready]
        told = [health.room.max_model_len for health in ready]
        known = [length for length in told if length is not None]
        return max(known) if known and len(known) == len(told) else None

    def unfit(self, kind: Kind, num_tokens: int, num_choices: int) -> list[Server]:
        """The servers that are known to have a shorter context than that, or fewer sequences."""
        rooms = {server: self._health[server].room for server in self.servers(kind)}
        return [s for s, room in rooms.items() if not room.holds(num_tokens, num_choices)]

    def polled(
        self,
        server: Server,
        *,
        ready: bool,
        reason: str,
        started_at: float,
        room: Room | None = None,
    ) -> None:
        polled = health.polled(
            self.health(server),
            ready=ready,
            reason=reason,
            started_at=started_at,
            room=room,
        )
        self._set(server, polled)

    def silent(self, server: Server, reason: str) -> None:
        new = health.silent(self.health(server), reason, self._policy)
        self._set(server, new)
        if not new.ready and new.silences >= self._policy.silences:
            self._on_silence(server, new.silences >= self._policy.long_silence)

    def unreachable(self, server: Server, reason: str) -> None:
        self._set(server, health.unreachable(self.health(server), reason, self._clock()))

    def failed(self, server: Server) -> None:
        self._set(server, health.failed(self.health(server), self._clock(), self._policy))

    def succeeded(self, server: Server) -> None:
        self._set(server, health.succeeded(self.health(server)))

    def _set(self, server: Server, new: Health) -> None:
        old = self._health.get(server)
        if old is None or old is new:
            return  # it left, or nothing changed
        self._health[server] = new
        if (old.ready, old.reason) != (new.ready, new.reason):
            self._on_change(server, old, new)
