"""The servers behind the proxy, and the health of each. Does no I/O.

A server is a member as long as a source names it: the command line, a file, a DNS
name, its own registration, or an operator. A leaving server gets no new requests and
is removed when its in-flight requests have finished. A drained server also receives
none, but stays a member.
"""

import bisect
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from protocol.errors import InvalidRequest, ModelNotFound
from protocol.pairing import may_pair
from protocol.short_repr import short_repr
from proxy import health
from proxy.health import Health, HealthReport, SideChannel

# A server that rejected a signature gets no signed hints or KV offers for this long, or
# until it restarts.
TRUST_COOLDOWN_S = 30.0
_MAX_NAMES = 64  # model names that an error message lists
# The fields of a server's health that decide which requests the server may get.
_ROUTING_FIELDS = ("ready", "models", "kv_digest")
LISTED = "listed"  # the source of servers that the command line lists
TWIN = "role both"  # the source of the second member for a server with role "both"


class Kind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Server:
    """One server. Clients see its name; only the log and operators see its URL.

    Only the server's Fleet changes the attributes, except `trust_circuit`.

    Attributes:
        index: the smallest number that no other member of its kind had when the server
            joined.
        sources: the sources that name the server; a server without any is leaving.
        drained: an operator has excluded the server from new requests.
        in_flight: number of requests that the server has from this proxy.
        circuit: the state of the circuit breaker for failed requests; see health.py.
        has_left: the server is no longer a member, and has no requests.
        trust_circuit: time (monotonic seconds) until which the server gets no signed
            hints or KV offers; and its side channel when it rejected a signature. For
            another side channel, as after a restart, the circuit is closed.
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
    trust_circuit: tuple[float, SideChannel | None] = (0.0, None)

    @property
    def is_trust_circuit_open(self) -> bool:
        """Whether the server rejected a signature recently and has not restarted."""
        until, side_channel = self.trust_circuit
        return time.monotonic() < until and side_channel == self.health.side_channel

    @property
    def name(self) -> str:
        return f"{self.kind.value}-{self.index}"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the server's metrics."""
        return {"role": self.kind.value, "server": self.name}

    @property
    def accepts(self) -> bool:
        """Whether the server may get new requests."""
        return self.health.ready and bool(self.sources) and not self.drained

    @property
    def state(self) -> str:
        """The state that operators see."""
        if not self.sources:
            return "leaving"
        if self.drained:
            return "draining" if self.in_flight else "drained"
        return "ready" if self.health.ready else "not_ready"

    def __str__(self) -> str:
        return f"{self.name} {self.url}"


class Pool:
    """The members of a fleet that meet a condition. `choose` picks one for a request.

    Args:
        has: returns whether a member belongs to the pool.
        name: pools with the same name share their round-robin positions.
    """

    def __init__(
        self, fleet: "Fleet", has: Callable[[Server], bool], name: str = ""
    ) -> None:
        self._fleet = fleet
        self._has = has
        self._name = name
        self._subpools: dict[Hashable, Pool] = {}
        # `_by_kind` and `_ready` are valid while the fleet's `num_changes` equals
        # `_num_changes`.
        self._by_kind: dict[Kind, list[Server]] = {}
        self._ready: dict[Kind, list[Server]] = {}
        self._num_changes = -1

    def _subpool(
        self, key: Hashable, has: Callable[[Server], bool], name: str
    ) -> "Pool":
        """Return the pool of the members that also meet `has`, cached under `key`."""
        if key not in self._subpools:
            self._subpools[key] = Pool(
                self._fleet, lambda s: self._has(s) and has(s), name
            )
        return self._subpools[key]

    def _refresh(self) -> None:
        if self._num_changes != self._fleet.num_changes:
            self._num_changes = self._fleet.num_changes
            for kind in Kind:
                members = self._fleet.members[kind]
                self._by_kind[kind] = [
                    server for server in members if self._has(server)
                ]
                self._ready[kind] = [s for s in self._by_kind[kind] if s.accepts]

    @property
    def by_kind(self) -> dict[Kind, list[Server]]:
        """The pool's servers by kind, in order of index."""
        self._refresh()
        return self._by_kind

    def paired(self) -> "Pool":
        """Return this pool without the prefill servers that have no reader.

        A prefill server stays if at least one ready decode server can read its KV.
        """
        reader_digests = frozenset(
            server.health.kv_digest for server in self.ready(Kind.DECODE)
        )

        def is_usable(server: Server) -> bool:
            if server.kind is Kind.DECODE:
                return True
            digest = server.health.kv_digest
            return any(may_pair(digest, reader) for reader in reader_digests)

        return self._subpool(reader_digests, is_usable, self._name)

    def readers_of(self, digest: str) -> "Pool":
        """Return the servers that can read the KV of a server with this kv_digest."""

        def can_read(server: Server) -> bool:
            return may_pair(digest, server.health.kv_digest)

        return self._subpool(digest, can_read, self._name)

    def ready(self, kind: Kind, exclude: Collection[Server] = ()) -> list[Server]:
        self._refresh()
        ready = self._ready[kind]
        return [s for s in ready if s not in exclude] if exclude else ready

    def choose(
        self,
        kind: Kind,
        exclude: Collection[Server] = (),
        turn_key: Hashable = None,
        choose_server: Callable[[list[Server]], Server] = lambda servers: servers[0],
    ) -> Server | None:
        """Choose the server for the next request; None if no server is ready.

        A server with a circuit that admits no request is chosen only if there is no
        other server. The chosen server has then had its turn. If its circuit is
        half-open, the request is the trial.

        Args:
            turn_key: servers take turns for requests with the same key. With a single
                key, a client that alternates two types of requests could send all
                requests of one type to the same server.
            choose_server: chooses one of the given servers, which are in the order of
                their turns.
        """
        fleet = self._fleet
        turn = (kind, self._name, turn_key)
        ready = self.ready(kind, exclude)
        now = fleet._clock()
        start = bisect.bisect_left(
            ready,
            fleet._next_index_by_turn.get(turn, 0),
            key=lambda server: server.index,
        )
        in_turn = [*ready[start:], *ready[:start]]
        usable = in_turn
        if any(server.health.open_until is not None for server in in_turn):
            admitting = [s for s in in_turn if health.admits(s.health, now)]
            usable = admitting or in_turn
        if not usable:
            return None
        server = choose_server(usable)
        fleet._next_index_by_turn[turn] = server.index + 1
        fleet._set_health(server, health.began(server.health, now))
        return server

    def longest_context(self, kind: Kind) -> int | None:
        """Return the longest context, in tokens, of the ready servers of a kind.

        None unless all of them have reported their contexts.
        """
        return max(self._contexts(kind), default=None)

    def shortest_context(self, kind: Kind) -> int | None:
        """Return the shortest context, in tokens, of the ready servers of a kind.

        None unless all of them have reported their contexts.
        """
        return min(self._contexts(kind), default=None)

    def _contexts(self, kind: Kind) -> list[int]:
        """Return the contexts of the ready servers; [] unless all have reported one."""
        lengths = [server.health.limits.max_model_len for server in self.ready(kind)]
        reported = [length for length in lengths if length is not None]
        return reported if len(reported) == len(lengths) else []

    def unfit(self, kind: Kind, num_tokens: int, num_choices: int) -> list[Server]:
        """Return the servers that are known to refuse a request of this size."""
        return [
            server
            for server in self.by_kind[kind]
            if not server.health.limits.accepts(num_tokens, num_choices)
        ]


def _ignore(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """The functions that a fleet calls when one of its members changes.

    The first argument of each function is the server.

    Attributes:
        on_join: the server is a member now.
        on_left: the server is no longer a member, and has no requests.
        on_change: (server, old, new): the server became ready, stopped being ready, or
            has another reason for not being ready.
        on_circuit: the state of the server's circuit has changed.
        on_silence: (server, whether this is a LONG_SILENCE): a health check was not
            answered, and the server is not ready because of that.
    """

    on_join: Callable[[Server], None] = _ignore
    on_left: Callable[[Server], None] = _ignore
    on_change: Callable[[Server, Health, Health], None] = _ignore
    on_circuit: Callable[[Server], None] = _ignore
    on_silence: Callable[[Server, bool], None] = _ignore


class Fleet(Pool):
    """All servers. No server is ready before its first health check.

    Args:
        urls: URLs by kind, in round-robin order. A URL may be listed for both kinds.

    Attributes:
        members: servers by kind, in order of index.
        num_changes: number of changes so far that may affect which member gets a
            request.
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
        self.num_changes = 0
        self._clock = clock
        self._watch = watch
        # The index at which round-robin starts, by kind, model and turn key.
        self._next_index_by_turn: dict[Hashable, int] = {}
        # Cached, like `_subpools`, until `_record_change` is called.
        self._models: list[str] | None = None
        self.name_members(LISTED, urls)

    @property
    def models(self) -> list[str]:
        """The names of the models that the members report."""
        if self._models is None:
            self._models = sorted(
                {name for each in self.servers for name in each.health.models}
            )
        return self._models

    def pool(self, model: str | None) -> Pool:
        """Return the servers of a model.

        Args:
            model: None if the request names no model, which is an error if the members
                have several models.

        Raises:
            ModelNotFound: no server serves this model.
            InvalidRequest: the request must name one of several models.
        """
        models = self.models
        if model is None:
            if len(models) > 1:
                raise InvalidRequest(
                    f"`model` must be one of {_join_names(models)}", param="model"
                )
            return self
        if not models:
            return self
        # A server that has not reported its models may have this model. There is one
        # cached Pool for each model name. All unknown names share one Pool, because
        # clients could otherwise create any number of Pools.
        name = model if model in models else ""

        def serves(server: Server) -> bool:
            return name in (server.health.models or (name,))

        pool = self._subpool((name,), serves, name)
        if not (name or pool.by_kind[Kind.DECODE]):
            raise ModelNotFound(
                f"`model` is {short_repr(model, 200)}; this endpoint has "
                f"{_join_names(models)}",
                param="model",
            )
        return pool

    def _record_change(self) -> None:
        self.num_changes += 1
        self._subpools.clear()
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
        """Record that a source now names exactly these URLs, by kind."""
        named = dict.fromkeys(
            (kind, url) for kind in Kind for url in urls.get(kind, ())
        )
        for kind, url in named:
            self.join(kind, url, source)
        for server in self.servers:
            if source in server.sources and (server.kind, server.url) not in named:
                self.leave(server, source)

    def join(
        self, kind: Kind, url: str, source: str, new_health: Health | None = None
    ) -> Server:
        """Record that a source names a server, and make the server a member if needed.

        Args:
            new_health: the health that a new member starts with.

        Returns:
            The member with this URL.
        """
        server = self.find(kind, url)
        if server is not None:
            server.sources.add(source)
            self._record_change()
            return server
        taken = {each.index for each in self.members[kind]}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        server = Server(kind, url, index, new_health or Health(), sources={source})
        bisect.insort(self.members[kind], server, key=lambda each: each.index)
        self._record_change()
        self._watch.on_join(server)
        return server

    def leave(self, server: Server, source: str) -> None:
        """Record that a source no longer names a server."""
        server.sources.discard(source)
        self._record_change()
        if not server.sources - {TWIN}:
            self._update_twin(server, False)
        self._remove_if_done(server)

    def _update_twin(self, server: Server, is_both: bool) -> None:
        """Add or remove the second member of a server that may take either leg."""
        if server.sources == {TWIN}:
            return
        other_kind = Kind.DECODE if server.kind is Kind.PREFILL else Kind.PREFILL
        twin = self.find(other_kind, server.url)
        if is_both and (twin is None or not twin.sources):
            self.join(other_kind, server.url, TWIN, server.health)
        elif not is_both and twin is not None and TWIN in twin.sources:
            self.leave(twin, TWIN)

    def drain(self, server: Server, drained: bool = True) -> None:
        """Exclude a server from new requests, or include it again."""
        server.drained = drained
        self._record_change()

    def add_in_flight(self, server: Server, num: int) -> None:
        """Add to the number of requests that a server has; `num` may be negative.

        The server may have left already: if no other server is ready, a stream returns
        to the server that handed it over.
        """
        server.in_flight += num
        self._remove_if_done(server)

    def _remove_if_done(self, server: Server) -> None:
        if server.sources or server.in_flight or server.has_left:
            return
        server.has_left = True
        self._next_index_by_turn.clear()  # drops the turns of models without a server
        self.members[server.kind].remove(server)
        self._record_change()
        self._watch.on_left(server)

    # health

    def polled(self, server: Server, report: HealthReport, started_at: float) -> None:
        """Update a server's health by the answer to a health check.

        A server does not become ready if a ready member is the same engine at another
        address.

        Args:
            started_at: when the check started.
        """
        before = server.health
        channel = report.side_channel
        if channel and not (before.ready and before.side_channel == channel):
            for other in self.members[server.kind]:
                is_used = other is not server and other.health.ready and other.sources
                if is_used and other.health.side_channel == channel:
                    reason = f"it is {other.name}, at another address"
                    report = replace(report, ready=False, reason=reason)
        self._set_health(server, health.polled(server.health, report, started_at))
        if report.ready and not server.has_left:
            self._update_twin(server, report.is_both and bool(server.sources))

    def silent(self, server: Server, reason: str) -> None:
        self._set_health(server, health.silent(server.health, reason))
        if not server.health.ready and server.health.num_silences >= health.SILENCES:
            self._watch.on_silence(
                server, server.health.num_silences >= health.LONG_SILENCE
            )

    def unreachable(self, server: Server, reason: str) -> None:
        self._set_health(
            server, health.unreachable(server.health, reason, self._clock())
        )

    def failed(self, server: Server) -> None:
        self._set_health(server, health.failed(server.health, self._clock()))

    def succeeded(self, server: Server) -> None:
        self._set_health(server, health.succeeded(server.health))

    def _set_health(self, server: Server, new: Health) -> None:
        old = server.health
        server.health = new
        if server.has_left:  # the server left a moment ago, with its last request
            return
        if any(getattr(old, name) != getattr(new, name) for name in _ROUTING_FIELDS):
            self._record_change()
        circuit = health.circuit(new, self._clock())
        if circuit != server.circuit:
            server.circuit = circuit
            self._watch.on_circuit(server)
        if (old.ready, old.reason) != (new.ready, new.reason):
            self._watch.on_change(server, old, new)


def _join_names(models: Sequence[str]) -> str:
    return ", ".join(short_repr(name, 200) for name in models[:_MAX_NAMES])
