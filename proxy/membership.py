"""The servers behind the proxy and what is known of each. Does no I/O."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from proxy import health, routing
from proxy.health import POLICY, Health, HealthPolicy, Said


class Kind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


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
        policy: HealthPolicy = POLICY,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[Server, Health, Health], None] = lambda *_: None,
        on_silence: Callable[[Server, bool], None] = lambda *_: None,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._on_change = on_change
        self._on_silence = on_silence
        self._health: dict[Server, Health] = {}
        self._last: dict[tuple[Kind, str], Server] = {}

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
        return len(self.ready(kind, exclude))

    def choose(
        self,
        kind: Kind,
        exclude: Collection[Server] = (),
        rotation: str = "",
        first: Callable[[list[Server]], Server] = lambda servers: servers[0],
    ) -> Server | None:
        """The server for the next request of this kind; None when no other is ready.

        Args:
            first: chooses among those that may take it; equals are best taken in their order.
            rotation: of requests that are alike. Each has its turns for itself: with one for all,
                a client that asks in a rhythm would give one server all of its long requests.
        """
        now = self._clock()
        usable = routing.usable(
            self.servers(kind),
            self._last.get((kind, rotation)),
            ready=lambda server: server not in exclude and self._health[server].ready,
            admits=lambda server: health.admits(self._health[server], now),
        )
        if not usable:
            return None
        server = first(usable)
        self._last[kind, rotation] = server
        self._set(server, health.began(self._health[server], now, self._policy))
        return server

    def ready(self, kind: Kind, exclude: Collection[Server] = ()) -> list[Server]:
        return [s for s in self.servers(kind) if self._health[s].ready and s not in exclude]

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

    def polled(self, server: Server, said: Said, started_at: float) -> None:
        self._set(server, health.polled(self.health(server), said, started_at))

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
