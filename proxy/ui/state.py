"""What the page shows: the servers, a ring of points in time, and a ring of requests.

Requests are noted always, as they begin and end: an object for each. Servers are asked for their
numbers only while a page asks here; all of them at once, ASKS_PER_S at most on the average. Every
change gets the next number of one count, so that a page gets what came after the last it has seen;
it makes rates of what is counted here. No texts are kept.
"""

import asyncio
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import msgspec

from protocol.process.logging import get_logger
from protocol.server_stats import MAX_ID_CHARS, STATS_PATH, FinishedRequest, ServerStats
from proxy.membership import Fleet, Kind, Server
from proxy.relay import Reply, RequestTrace
from proxy.upstream import HttpUpstream, UpstreamError, as_text, within

logger = get_logger(__name__)

MAX_REQUESTS = 200  # that have ended
MAX_RUNNING = 50  # the newest of those that have not
MAX_POINTS = 300
MAX_SAMPLES = 64  # of a point
MAX_COLUMNS = 200  # numbers of a point, for each kind of server
INTERVAL_S = 1.0
ASKS_PER_S = 10  # of many servers each is asked less often
LINGER_S = 10.0  # after the last question of a page
ASK_TIMEOUT_S = 1.0

_ADDRESS = re.compile(r"\w+://\S+|\('[^)]*\)")  # are for the log alone
_decode = msgspec.json.Decoder(ServerStats).decode
_NOTHING = ServerStats({}, {}, [], 0)
Row = dict[str, Any]


@dataclass(eq=False)
class Request:
    """A client's request. `reply` is let go at its end: a connection's buffers hang on it."""

    number: int
    id: str
    path: str
    trace: RequestTrace
    reply: Reply | None
    changed: int
    at: float = field(default_factory=time.time)
    status: str | None = None
    end_s: float | None = None
    served: dict[str, FinishedRequest] = field(
        default_factory=dict
    )  # by the server's name
    seen: tuple[int, bool] = (
        0,
        False,
    )  # legs, and whether bytes have come, at the last look

    def row(self) -> Row:
        trace = self.trace
        return {
            "number": self.number,
            "id": self.id,
            "path": self.path,
            "at": self.at,
            "status": self.status,
            "alone": None if trace.decode_only == "-" else trace.decode_only,
            "legs": trace.legs,
            "first_s": trace.first_byte_s,
            "end_s": self.end_s,
            "served": self.served,
        }


@dataclass(eq=False)
class Known:
    """What a server has told, and how that is shown."""

    told: ServerStats = _NOTHING
    problem: str = ""  # why it tells nothing
    row: Row = field(default_factory=dict)
    changed: int = 0


class State:
    """
    Args:
        is_on: otherwise nothing is noted.
        has_keys: the proxy asks its clients for an API key.
    """

    def __init__(
        self, fleet: Fleet, upstream: HttpUpstream, *, is_on: bool, has_keys: bool
    ) -> None:
        self.is_on = is_on
        self._has_keys = has_keys
        self._fleet, self._upstream = fleet, upstream
        self._epoch = secrets.token_hex(8)
        self._count = self._num_requests = 0
        self._running: dict[Reply, Request] = {}
        self._ended: deque[Request] = deque()
        self._by_id: dict[str, Request] = {}
        self._totals = Counter({"ended": 0, "failed": 0, "pd": 0, "alone": 0})
        self._known: dict[Server, Known] = {}
        self._columns: dict[
            str, int
        ] = {}  # where a number is in points; only ever longer
        self._columns_changed = 0
        self._points: deque[tuple[int, Row]] = deque(maxlen=MAX_POINTS)
        self._first_bytes: list[float] = []  # since the last point, of streams (s)
        self._asked_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._has_looked = asyncio.Event()

    # requests

    def began(self, path: str, reply: Reply) -> None:
        if not self.is_on:
            return
        self._num_requests += 1
        sent = as_text(reply.request_id).encode()  # which the servers call it by
        told = sent.decode("latin-1")[:MAX_ID_CHARS]
        request = Request(
            self._num_requests, told, path, reply.trace, reply, self._next()
        )
        self._running[reply] = self._by_id[told] = request

    def ended(self, reply: Reply, status: str) -> None:
        request, trace = self._running.pop(reply, None), reply.trace
        if request is None:  # refused to a key, or the page is off
            return
        request.reply, request.changed = None, self._next()
        request.status, request.end_s = status, trace.elapsed_s()
        is_failed = status == "broken" or status.startswith("5")
        self._totals["ended"] += 1
        self._totals["failed"] += is_failed
        self._totals["alone"] += trace.decode_only != "-"
        self._totals["pd"] += "-" not in (trace.prefill, trace.decode)
        if (
            reply.is_stream
            and trace.first_byte_s
            and len(self._first_bytes) < MAX_SAMPLES
        ):
            self._first_bytes.append(trace.first_byte_s)
        self._ended.append(request)
        if len(self._ended) > MAX_REQUESTS:
            old = self._ended.popleft()
            if self._by_id.get(old.id) is old:
                del self._by_id[old.id]

    # pages

    async def since(self, number: int, epoch: str) -> bytes:
        """What has changed after `number` of this `epoch`; all there is to a page of another."""
        self._asked_at = time.monotonic()
        if self._task is None or self._task.done():
            self._has_looked.clear()
            self._task = asyncio.create_task(self._watch())
        await self._has_looked.wait()
        after = number if epoch == self._epoch else -1
        running = list(islice(reversed(self._running.values()), MAX_RUNNING))
        requests = [
            one.row() for one in chain(self._ended, running) if one.changed > after
        ]
        known = {server.name: known for server, known in self._known.items()}
        return msgspec.json.encode(
            {
                "epoch": self._epoch,
                "number": self._count,
                "at": time.time(),  # to which running requests have lasted
                "has_keys": self._needs_key,
                "interval_s": self._interval_s,
                "names": list(known),
                "servers": {
                    name: one.row for name, one in known.items() if one.changed > after
                },
                "columns": list(self._columns)
                if self._columns_changed > after
                else None,
                "points": [point for changed, point in self._points if changed > after],
                "running": [one.number for one in running],
                "requests": requests,
            }
        )

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # servers

    @property
    def _needs_key(self) -> bool:
        """Whether clients need an API key: the proxy's, or one that it passes on to servers."""
        return self._has_keys or any(s.health.is_bare for s in self._fleet.servers)

    @property
    def _interval_s(self) -> float:
        return max(INTERVAL_S, len(self._fleet.servers) / ASKS_PER_S)

    async def _watch(self) -> None:
        self._first_bytes.clear()
        while time.monotonic() < self._asked_at + LINGER_S:
            try:
                await self._look()
            except Exception:  # our own bug must not leave a page without its state
                logger.exception("what the page's look at the servers found")
            self._has_looked.set()
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        servers = self._fleet.servers
        self._known = {server: self._known.get(server) or Known() for server in servers}
        await asyncio.gather(
            *(self._ask(server, self._known[server]) for server in servers)
        )
        for request in self._running.values():
            seen = (len(request.trace.legs), request.trace.first_byte_s is not None)
            if seen != request.seen:
                request.seen, request.changed = seen, self._next()
        for server, known in self._known.items():
            row = _row(server, known)
            if row != known.row:
                known.row, known.changed = row, self._next()
        self._points.append((self._next(), self._point()))
        self._first_bytes.clear()

    async def _ask(self, server: Server, known: Known) -> None:
        known.problem, before = "not ready", known.told
        known.told = ServerStats(before.server, {}, [], before.next)
        if not server.health.ready:
            return
        if server.health.is_foreign:
            known.problem = "it speaks vLLM's dialect, and tells no numbers"
            return
        try:
            async with within(ASK_TIMEOUT_S):
                path = f"{STATS_PATH}?since={before.next}"
                response = await self._upstream.send(
                    server.url, "GET", path, headers=[]
                )
                known.told = _decode(await response.read())
        except (UpstreamError, TimeoutError):
            known.problem = f"no numbers within {ASK_TIMEOUT_S:g} s"
        except msgspec.DecodeError:
            known.problem = f"GET {STATS_PATH} answers with status {response.status}"
        else:
            known.problem = ""
            self._served(server.name, known.told.served)

    def _served(self, name: str, told: Iterable[FinishedRequest]) -> None:
        for served in told:
            request = self._by_id.get(served.id)
            if request is not None and any(
                name == asked for asked, _ in request.trace.legs
            ):
                request.served[name] = served
                request.changed = self._next()

    def _point(self) -> Row:
        """Counts since the servers' starts, to be compared where `of` is the same."""
        sums = {kind.value: Counter[str]() for kind in Kind}
        for server, known in self._known.items():
            if server.kind is Kind.DECODE or not self._fleet.find(
                Kind.DECODE, server.url
            ):
                sums[server.kind.value].update(
                    known.told.values
                )  # once, if it is of both kinds
        for name in {
            name for counts in sums.values() for name in counts
        } - self._columns.keys():
            if len(self._columns) < MAX_COLUMNS:
                self._columns[name], self._columns_changed = (
                    len(self._columns),
                    self._next(),
                )
        rows = {
            kind: [counts[name] for name in self._columns]
            for kind, counts in sums.items()
        }
        return {
            "at": time.time(),
            "of": hash(
                tuple(s.name for s, known in self._known.items() if known.told.values)
            ),
            "first_bytes": self._first_bytes[:],
            "open": len(self._running),
            **self._totals,
            **rows,
        }

    def _next(self) -> int:
        self._count += 1
        return self._count


def _row(server: Server, known: Known) -> Row:
    health, told = server.health, known.told.server
    return {
        **{
            name: one
            for name, one in told.items()
            if not name.startswith("side_channel")
        },
        "role": server.kind.value,
        "state": server.state,
        "models": health.models or ([told["model"]] if "model" in told else []),
        "reason": known.problem if health.ready else _ADDRESS.sub("…", health.reason),
        "circuit": server.circuit,
        "in_flight": server.in_flight,
        "values": known.told.values,
    }
