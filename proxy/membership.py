"""The servers behind the proxy and what is known of each. Does no I/O."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from proxy import health
from proxy.health import Health, Said


class Kind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Server:
    """One server. Clients are told its name; its URL is for the log alone.

    Attributes:
        index: its place among those of its kind, as the operator gave them.
        health: changed by its Fleet alone.
    """

    kind: Kind
    url: str
    index: int = 0
    health: Health = field(default_factory=Health)

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
    """All servers, not ready until a health check says so.

    Args:
        urls: by kind, in the order in which they take turns; one may be of both kinds.
        on_change: called with (server, old, new) when a server becomes ready or stops being so, and
            when the reason why it is not ready is another.
        on_silence: called with (server, whether that is a LONG_SILENCE) at each health check
            without an answer, once they have made a server not ready.
    """

    def __init__(
        self,
        urls: Mapping[Kind, Iterable[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[Server, Health, Health], None] = lambda *_: None,
        on_silence: Callable[[Server, bool], None] = lambda *_: None,
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._on_silence = on_silence
        self.of = {kind: _servers(kind, urls.get(kind, ())) for kind in Kind}
        self._next: dict[tuple[Kind, str], int] = {}  # whose turn it is, by index

    @property
    def servers(self) -> list[Server]:
        return [server for kind in Kind for server in self.of[kind]]

    def choose(
        self,
        kind: Kind,
        exclude: Collection[Server] = (),
        rotation: str = "",
        first: Callable[[list[Server]], Server] = lambda servers: servers[0],
    ) -> Server | None:
        """The server for the next request of this kind; None when no other is ready. Servers whose
        circuit admits no request are only taken where there are no others.

        Args:
            first: chooses among those that may take it; equals are best taken in their order.
            rotation: of requests that are alike. Each has its turns for itself: with one for all,
                a client that asks in a rhythm would give one server all of its long requests.
        """
        now = self._clock()
        start = self._next.get((kind, rotation), 0)
        in_turn = self.of[kind][start:] + self.of[kind][:start]
        ready = [s for s in in_turn if s.health.ready and s not in exclude]
        usable = [s for s in ready if health.admits(s.health, now)] or ready
        if not usable:
            return None
        server = first(usable)
        self._next[kind, rotation] = server.index + 1
        self._set(server, health.began(server.health, now))
        return server

    def ready(self, kind: Kind, exclude: Collection[Server] = ()) -> list[Server]:
        return [s for s in self.of[kind] if s.health.ready and s not in exclude]

    def context(self, kind: Kind) -> int | None:
        """The longest context of the ready servers of a kind; None unless all have said theirs."""
        told = [server.health.room.max_model_len for server in self.ready(kind)]
        known = [length for length in told if length is not None]
        return max(known) if known and len(known) == len(told) else None

    def unfit(self, kind: Kind, num_tokens: int, num_choices: int) -> list[Server]:
        """The servers that are known to have a shorter context than that, or fewer sequences."""
        return [s for s in self.of[kind] if not s.health.room.holds(num_tokens, num_choices)]

    def polled(self, server: Server, said: Said, started_at: float) -> None:
        self._set(server, health.polled(server.health, said, started_at))

    def silent(self, server: Server, reason: str) -> None:
        self._set(server, health.silent(server.health, reason))
        if not server.health.ready and server.health.silences >= health.SILENCES:
            self._on_silence(server, server.health.silences >= health.LONG_SILENCE)

    def unreachable(self, server: Server, reason: str) -> None:
        self._set(server, health.unreachable(server.health, reason, self._clock()))

    def failed(self, server: Server) -> None:
        self._set(server, health.failed(server.health, self._clock()))

    def succeeded(self, server: Server) -> None:
        self._set(server, health.succeeded(server.health))

    def _set(self, server: Server, new: Health) -> None:
        old, server.health = server.health, new
        if (old.ready, old.reason) != (new.ready, new.reason):
            self._on_change(server, old, new)


def _servers(kind: Kind, urls: Iterable[str]) -> list[Server]:
    return [Server(kind, url, index) for index, url in enumerate(dict.fromkeys(urls))]
