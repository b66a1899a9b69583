"""The servers behind the proxy and what is known of each. Does no I/O.

A server is a member as long as one source names it: the command line, a file, a DNS name, its own
registration, an operator. One that leaves gets no new requests, and is gone when those that it has
have ended; so it is with one that is drained, but that it stays.
"""

import bisect
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from protocol.errors import InvalidRequest, ModelNotFound
from protocol.handshake import may_pair
from protocol.messages import KVHint
from protocol.short_repr import short_repr
from proxy import health
from proxy.health import Health, Said, SideChannel

DOUBTED_S = 30.0  # for which a server that believed no signature is sent none, unless it restarts
_TOLD = 64  # names in an error
_MAX_TOKENS = 1 << 24
_MAY_HAVE = 4  # as many tokens as are known of: text may have one for each byte
_DECIDE = ("ready", "models", "kv_digest")  # of a server's health, what it may be given
LISTED = "listed"  # the source that is the command line
TWIN = "role both"  # the source that is the same server, as one of the other kind


class Kind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Server:
    """One server. Clients are told its name; its URL is for the log and for operators alone.

    Attributes:
        index: the smallest that no other of its kind had when it joined.
        health: changed by its Fleet alone, as are the others.
        sources: who names it; none: it leaves.
        drained: an operator took it out.
        in_flight: requests that it has from this proxy.
        doubted: until when it may not believe what this proxy signs, and which of its starts.
    """

    kind: Kind
    url: str
    index: int = 0
    health: Health = field(default_factory=Health)
    sources: set[str] = field(default_factory=set)
    drained: bool = False
    in_flight: int = 0
    circuit: str = "closed"
    has_left: bool = False
    doubted: tuple[float, SideChannel | None] = (0.0, None)

    @property
    def is_doubted(self) -> bool:
        """Nobody names it KV to pull, nor streams to go on with."""
        until, start = self.doubted
        return time.monotonic() < until and start == self.health.side_channel

    @property
    def name(self) -> str:
        return f"{self.kind.value}-{self.index}"

    @property
    def labels(self) -> dict[str, str]:
        """Of its metrics."""
        return {"role": self.kind.value, "server": self.name}

    @property
    def accepts(self) -> bool:
        """Whether it may be given requests."""
        return self.health.ready and bool(self.sources) and not self.drained

    @property
    def state(self) -> str:
        """For people."""
        if not self.sources:
            return "leaving"
        if self.drained:
            return "draining" if self.in_flight else "drained"
        return "ready" if self.health.ready else "not_ready"

    def __str__(self) -> str:
        return f"{self.name} {self.url}"


class Pool:
    """Those servers of a fleet that may get a request, whoever came or left since, and their turns.

    Args:
        has: whether a member is one of them.
        name: of its turns.
    """

    def __init__(
        self, fleet: "Fleet", has: Callable[[Server], bool], name: str = ""
    ) -> None:
        self._fleet, self._has, self._name = fleet, has, name
        self._parts: dict[Hashable, Pool] = {}
        self._of: dict[Kind, list[Server]] = {}  # as of `_changes`, as is `_ready`
        self._ready: dict[Kind, list[Server]] = {}
        self._changes = -1

    def _part(self, key: Hashable, has: Callable[[Server], bool], name: str) -> "Pool":
        if key not in self._parts:
            self._parts[key] = Pool(
                self._fleet, lambda s: self._has(s) and has(s), name
            )
        return self._parts[key]

    def _look(self) -> None:
        if self._changes != self._fleet.changes:
            self._changes = self._fleet.changes
            self._of = {k: [*filter(self._has, self._fleet.members[k])] for k in Kind}
            self._ready = {k: [s for s in self._of[k] if s.accepts] for k in Kind}

    @property
    def of(self) -> dict[Kind, list[Server]]:
        """All of them by kind, in order of index."""
        self._look()
        return self._of

    def paired(self) -> "Pool":
        """This one without prefill servers whose KV no decode server that is ready can read."""
        told = frozenset(server.health.kv_digest for server in self.ready(Kind.DECODE))

        def fits(server: Server) -> bool:
            digest = server.health.kv_digest
            return server.kind is Kind.DECODE or any(
                may_pair(digest, each) for each in told
            )

        return self._part(told, fits, self._name)

    def readers_of(self, digest: str) -> "Pool":
        """Those that can read KV of this digest."""
        return self._part(
            digest, lambda s: may_pair(digest, s.health.kv_digest), self._name
        )

    def ready(self, kind: Kind, exclude: Collection[Server] = ()) -> list[Server]:
        self._look()
        ready = self._ready[kind]
        return [s for s in ready if s not in exclude] if exclude else ready

    def choose(
        self,
        kind: Kind,
        exclude: Collection[Server] = (),
        alike: Hashable = None,
        first: Callable[[list[Server]], Server] = lambda servers: servers[0],
    ) -> Server | None:
        """The server for the next request of this kind; None when no other is ready. Servers whose
        circuit admits no request are only taken where there are no others.

        Args:
            first: chooses among those that may take it; equals are best taken in their order.
            alike: those of one value have turns for themselves: with the same for all, a client
                that asks in a rhythm would give one server all of its long requests.
        """
        fleet, turn, ready = (
            self._fleet,
            (kind, self._name, alike),
            self.ready(kind, exclude),
        )
        now = fleet._clock()
        at = bisect.bisect_left(
            ready, fleet._next.get(turn, 0), key=lambda server: server.index
        )
        usable = in_turn = [*ready[at:], *ready[:at]]
        if any(s.health.open_until is not None for s in in_turn):
            usable = [s for s in in_turn if health.admits(s.health, now)] or in_turn
        if not usable:
            return None
        server = first(usable)
        fleet._next[turn] = server.index + 1
        fleet._set(server, health.began(server.health, now))
        return server

    def context(self, kind: Kind) -> int | None:
        """The longest context of the ready servers of a kind; None unless all have said theirs."""
        return max(self._contexts(kind), default=None)

    def shortest_context(self, kind: Kind) -> int | None:
        """The shortest context of the ready servers of a kind; None unless all have said theirs."""
        return min(self._contexts(kind), default=None)

    def _contexts(self, kind: Kind) -> list[int]:
        """Of the ready servers of a kind; none unless all have said theirs."""
        lengths = [server.health.room.max_model_len for server in self.ready(kind)]
        known = [length for length in lengths if length is not None]
        return known if len(known) == len(lengths) else []

    def unfit(self, kind: Kind, num_tokens: int, num_choices: int) -> list[Server]:
        """The servers that are known to have a shorter context than that, or fewer sequences."""
        return [
            s for s in self.of[kind] if not s.health.room.holds(num_tokens, num_choices)
        ]


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """What a fleet tells of its members; each is called with the server first.

    Attributes:
        on_join, on_left: it is a member; it is none any more, and has nothing to do.
        on_change: (server, old, new) when it becomes ready or stops being so, and when the reason
            why it is not ready is another.
        on_circuit: when its circuit is another.
        on_silence: (server, whether that is a LONG_SILENCE) at each health check without an
            answer, once they have made a server not ready.
    """

    on_join: Callable[[Server], None] = _nothing
    on_left: Callable[[Server], None] = _nothing
    on_change: Callable[[Server, Health, Health], None] = _nothing
    on_circuit: Callable[[Server], None] = _nothing
    on_silence: Callable[[Server, bool], None] = _nothing


class Fleet(Pool):
    """All servers, not ready until a health check says so.

    Args:
        urls: by kind, in the order in which they take turns; one may be of both kinds.

    Attributes:
        members: by kind, in order of index.
        changes: of them, and of what decides who may be given requests.
    """

    def __init__(
        self,
        urls: Mapping[Kind, Iterable[str]] = {},
        watch: Watch = Watch(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self, lambda server: True)
        self.members: dict[Kind, list[Server]] = {kind: [] for kind in Kind}
        self.changes = 0
        self._clock = clock
        self._watch = watch
        self._next: dict[Hashable, int] = {}  # whose turn it is, by index
        self._models: list[str] | None = (
            None  # kept, as `_parts`, until something changes
        )
        self.name_members(LISTED, urls)

    @property
    def models(self) -> list[str]:
        """The names that its members serve, as far as they have told."""
        if self._models is None:
            self._models = sorted(
                {name for each in self.servers for name in each.health.models}
            )
        return self._models

    def pool(self, model: str | None) -> Pool:
        """The servers of a model; of the only one there is, where a request names none.

        Raises:
            ModelNotFound, InvalidRequest: there is none of that name; there are several.
        """
        models = self.models
        if model is None:
            if len(models) > 1:
                told = _named(models)
                raise InvalidRequest(f"`model` must say one of {told}", param="model")
            return self
        if not models:
            return self
        # Who has not told its names yet may have this one. What no server has told is kept as one:
        # clients name as many as they like.
        known = model if model in models else ""
        pool = self._part(
            (known,), lambda s: known in (s.health.models or (known,)), known
        )
        if not (known or pool.of[Kind.DECODE]):
            told = f"{short_repr(model, 200)}; this endpoint has {_named(models)}"
            raise ModelNotFound(f"`model` is {told}", param="model")
        return pool

    def _has_changed(self) -> None:
        self.changes += 1
        self._parts.clear()
        self._models = None

    @property
    def servers(self) -> list[Server]:
        return [server for kind in Kind for server in self.members[kind]]

    # members

    def find(self, kind: Kind, url: str) -> Server | None:
        return next(
            (server for server in self.members[kind] if server.url == url), None
        )

    def name_members(self, source: str, urls: Mapping[Kind, Iterable[str]]) -> None:
        """These are all that the source names now."""
        named = dict.fromkeys(
            (kind, url) for kind in Kind for url in urls.get(kind, ())
        )
        for kind, url in named:
            self.join(kind, url, source)
        for server in self.servers:
            if source in server.sources and (server.kind, server.url) not in named:
                self.leave(server, source)

    def join(
        self, kind: Kind, url: str, source: str, said: Health | None = None
    ) -> Server:
        """The member of that URL, which the source names from now on.

        Args:
            said: what the source says of one that is new.
        """
        server = self.find(kind, url)
        if server is not None:
            server.sources.add(source)
            self._has_changed()
            return server
        taken = {each.index for each in self.members[kind]}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        server = Server(kind, url, index, said or Health(), sources={source})
        bisect.insort(self.members[kind], server, key=lambda each: each.index)
        self._has_changed()
        self._watch.on_join(server)
        return server

    def leave(self, server: Server, source: str) -> None:
        """The source names it no more."""
        server.sources.discard(source)
        self._has_changed()
        if not server.sources - {TWIN}:
            self._twin(server, False)
        self._end(server)

    def _twin(self, server: Server, is_both: bool) -> None:
        """A server that takes either leg is a member of both kinds, whichever it was named as."""
        if server.sources == {TWIN}:
            return
        other = Kind.DECODE if server.kind is Kind.PREFILL else Kind.PREFILL
        twin = self.find(other, server.url)
        if is_both and (twin is None or not twin.sources):
            self.join(other, server.url, TWIN, server.health)
        elif not is_both and twin is not None and TWIN in twin.sources:
            self.leave(twin, TWIN)

    def drain(self, server: Server, drained: bool = True) -> None:
        """It is given nothing new, or is again."""
        server.drained = drained
        self._has_changed()

    def works(self, server: Server, num: int) -> None:
        """It was given so many requests more. One that has left may be, for a stream of its own."""
        server.in_flight += num
        self._end(server)

    def _end(self, server: Server) -> None:
        if server.sources or server.in_flight or server.has_left:
            return
        server.has_left = True
        self._next.clear()  # turns of models that nobody serves any more
        self.members[server.kind].remove(server)
        self._has_changed()
        self._watch.on_left(server)

    # what is heard of them

    def polled(self, server: Server, said: Said, started_at: float) -> None:
        known, channel = server.health, said.side_channel
        if channel and not (known.ready and known.side_channel == channel):
            for other in self.members[server.kind]:
                is_used = other is not server and other.health.ready and other.sources
                if is_used and other.health.side_channel == channel:
                    reason = f"it is {other.name}, by another address"
                    said = replace(said, ready=False, reason=reason)
        self._set(server, health.polled(server.health, said, started_at))
        if said.ready and not server.has_left:
            self._twin(server, said.is_both and bool(server.sources))

    def silent(self, server: Server, reason: str) -> None:
        self._set(server, health.silent(server.health, reason))
        if not server.health.ready and server.health.silences >= health.SILENCES:
            self._watch.on_silence(
                server, server.health.silences >= health.LONG_SILENCE
            )

    def unreachable(self, server: Server, reason: str) -> None:
        self._set(server, health.unreachable(server.health, reason, self._clock()))

    def failed(self, server: Server) -> None:
        self._set(server, health.failed(server.health, self._clock()))

    def succeeded(self, server: Server) -> None:
        self._set(server, health.succeeded(server.health))

    def _set(self, server: Server, new: Health) -> None:
        old, server.health = server.health, new
        if server.has_left:  # what became of its last request
            return
        if any(getattr(old, name) != getattr(new, name) for name in _DECIDE):
            self._has_changed()
        circuit = health.circuit(new, self._clock())
        if circuit != server.circuit:
            server.circuit = circuit
            self._watch.on_circuit(server)
        if (old.ready, old.reason) != (new.ready, new.reason):
            self._watch.on_change(server, old, new)


def hint(reader: Server, lenders: Iterable[tuple[object, int]]) -> KVHint | None:
    """What a server is told that computes a prompt: the first of some servers that can lend it KV.
    One that is wrong costs a question, one whose lender is dead a second.

    Args:
        lenders: each with the tokens of the prompt that it may have.
    """
    own = reader.health
    if own.is_foreign or not own.subscribes:
        return None
    for lender, num_tokens in lenders:
        if not isinstance(lender, Server) or lender.url == reader.url:
            continue
        told = lender.health
        channel, is_well = told.side_channel, told.ready and told.open_until is None
        is_known = told.kv_digest and own.kv_digest
        if channel and is_well and is_known and may_pair(told.kv_digest, own.kv_digest):
            return KVHint(
                host=channel.host or urlsplit(lender.url).hostname or "",
                port=channel.port,
                engine_id=channel.engine_id,
                incarnation=channel.incarnation,
                num_tokens=min(num_tokens * _MAY_HAVE, _MAX_TOKENS),
            )
    return None


def _named(models: Sequence[str]) -> str:
    return ", ".join(short_repr(name, 200) for name in models[:_TOLD])
