"""The data of the proxy's web page: servers, points of charts, and recent requests.

- Each request is recorded when it starts and when it ends. No prompts or answers are
  stored.
- All servers are queried for their statistics together: once per second while a page
  polls the proxy, and otherwise every HISTORY_INTERVAL_S (points.py). With many servers
  the interval is longer, so that there are at most POLLS_PER_S queries per second.
- Every change gets the next number of one counter. A page sends the number of the last
  answer that it received, and receives only later changes.
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

import msgspec

from protocol.process.logging import get_logger
from protocol.server_stats import MAX_ID_CHARS, STATS_PATH, FinishedRequest, ServerStats
from proxy.membership import Fleet, Kind, Server
from proxy.relay import Reply
from proxy.request_trace import RequestTrace
from proxy.ui.points import HISTORY_INTERVAL_S, Points, Row
from proxy.upstream import HttpUpstream, UpstreamError, as_text, within

logger = get_logger(__name__)

MAX_REQUESTS = 200  # finished requests that are stored
MAX_RUNNING = 50  # a page receives only this many running requests: the newest
INTERVAL_S = 1.0
POLLS_PER_S = 10  # with more servers, each is queried less often
LINGER_S = 10.0  # a page counts as open for this long after its last poll
POLL_TIMEOUT_S = 1.0

_ADDRESS = re.compile(r"\w+://\S+|\('[^)]*\)")  # the page must not show addresses
_decode = msgspec.json.Decoder(ServerStats).decode
_NO_STATS = ServerStats({}, {}, [], 0)


@dataclass(eq=False)
class Request:
    """A client's request, as the page shows it.

    Attributes:
        reply: None after the end, because a reply holds a connection's buffers.
        changed: number of the request's last change, from the counter of changes.
        started_at: when the request started, in Unix seconds.
        status: the outcome; None while the request runs.
        end_s: seconds from the start to the end; None while the request runs.
        served: the reports of servers about the request, by the server's name.
        progress: number of legs, and whether bytes of the answer had arrived, when the
            servers were last queried.
    """

    number: int
    id: str
    path: str
    trace: RequestTrace
    reply: Reply | None
    changed: int
    started_at: float = field(default_factory=time.time)
    status: str | None = None
    end_s: float | None = None
    served: dict[str, FinishedRequest] = field(default_factory=dict)
    progress: tuple[int, bool] = (0, False)

    def row(self) -> Row:
        """Return the request as the page receives it."""
        trace = self.trace
        return {
            "number": self.number,
            "id": self.id,
            "path": self.path,
            "at": self.started_at,
            "status": self.status,
            "alone": None if trace.decode_only == "-" else trace.decode_only,
            "legs": trace.legs,
            "first_s": trace.first_byte_s,
            "end_s": self.end_s,
            "served": self.served,
        }


@dataclass(eq=False)
class ServerRow:
    """The last statistics of a server, and its row on the page.

    Attributes:
        problem: why there are no statistics; empty if there are.
        row: the server as the page receives it.
        changed: number of the row's last change, from the counter of changes.
    """

    stats: ServerStats = _NO_STATS
    problem: str = ""
    row: Row = field(default_factory=dict)
    changed: int = 0


class State:
    """The data of one proxy's page.

    Args:
        is_on: if False, nothing is recorded.
        has_keys: the proxy requires an API key from its clients.
    """

    def __init__(
        self, fleet: Fleet, upstream: HttpUpstream, *, is_on: bool, has_keys: bool
    ) -> None:
        self.is_on = is_on
        self._has_keys = has_keys
        self._fleet = fleet
        self._upstream = upstream
        self._epoch = secrets.token_hex(8)
        self._num_changes = 0
        self._num_requests = 0
        self._running: dict[Reply, Request] = {}
        self._finished: deque[Request] = deque()
        self._requests_by_id: dict[str, Request] = {}
        self._totals = Counter({"ended": 0, "failed": 0, "pd": 0, "alone": 0})
        self._servers: dict[Server, ServerRow] = {}
        self.points = Points()
        self._last_poll_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._has_data = asyncio.Event()
        self._is_opened = asyncio.Event()  # a page was opened: query servers at once

    # requests

    def began(self, path: str, reply: Reply) -> None:
        """Record that a request has started."""
        if not self.is_on:
            return
        self._num_requests += 1
        # Servers receive the id as UTF-8, and report these bytes decoded as Latin-1.
        sent_id = as_text(reply.request_id).encode()
        request_id = sent_id.decode("latin-1")[:MAX_ID_CHARS]
        request = Request(
            number=self._num_requests,
            id=request_id,
            path=path,
            trace=reply.trace,
            reply=reply,
            changed=self._next_change(),
        )
        self._running[reply] = request
        self._requests_by_id[request_id] = request

    def ended(self, reply: Reply, status: str) -> None:
        """Record that a request has ended."""
        trace = reply.trace
        request = self._running.pop(reply, None)
        if request is None:  # it was refused before it started, or the page is off
            return
        request.reply = None
        request.changed = self._next_change()
        request.status = status
        request.end_s = trace.elapsed_s()
        self._totals["ended"] += 1
        if status == "broken" or status.startswith("5"):
            self._totals["failed"] += 1
        if trace.decode_only != "-":
            self._totals["alone"] += 1
        if "-" not in (trace.prefill, trace.decode):
            self._totals["pd"] += 1
        if reply.is_stream and trace.first_byte_s:
            self.points.add_first_byte(trace.first_byte_s)
        self._finished.append(request)
        if len(self._finished) > MAX_REQUESTS:
            oldest = self._finished.popleft()
            if self._requests_by_id.get(oldest.id) is oldest:
                del self._requests_by_id[oldest.id]

    # pages

    async def since(self, number: int, epoch: str) -> bytes:
        """Return the changes since the answer with `number`, as JSON.

        If no page was open before, this method first waits until all servers have been
        queried, for at most 2 * POLL_TIMEOUT_S.

        Args:
            number: the number of the last answer that the page received; 0 if none.
            epoch: the epoch of the last answer that the page received. A page with the
                epoch of another proxy process gets all data.
        """
        if not self._is_watched:
            self.points.forget_first_bytes()
            self._has_data.clear()
            self._is_opened.set()
        self._last_poll_at = time.monotonic()
        await self._has_data.wait()
        after = number if epoch == self._epoch else -1
        running = list(islice(reversed(self._running.values()), MAX_RUNNING))
        requests = chain(self._finished, running)
        servers = {server.name: row for server, row in self._servers.items()}
        changed_rows = {
            name: server.row
            for name, server in servers.items()
            if server.changed > after
        }
        columns = None
        if self.points.columns_changed > after:
            columns = self.points.columns
        return msgspec.json.encode(
            {
                "epoch": self._epoch,
                "number": self._num_changes,
                # The page shows how long requests have been running until this time.
                "at": time.time(),
                "has_keys": self._needs_key,
                "interval_s": self._interval_s,
                "history_interval_s": HISTORY_INTERVAL_S,
                "names": list(servers),
                "servers": changed_rows,
                "columns": columns,
                "points": self.points.recent(after),
                "history": self.points.history(after),
                "running": [request.number for request in running],
                "requests": [each.row() for each in requests if each.changed > after],
            }
        )

    def start(self) -> None:
        """Begin to query the servers and to record their history."""
        if self.is_on:
            self._task = asyncio.create_task(self._poll_servers())

    async def close(self) -> None:
        """Stop querying the servers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # servers

    @property
    def _needs_key(self) -> bool:
        """Whether clients need an API key, of the proxy or of the servers behind it."""
        if self._has_keys:
            return True
        return any(server.health.is_bare for server in self._fleet.servers)

    @property
    def _interval_s(self) -> float:
        return max(INTERVAL_S, len(self._fleet.servers) / POLLS_PER_S)

    @property
    def _is_watched(self) -> bool:
        """Whether a page is open."""
        return time.monotonic() < self._last_poll_at + LINGER_S

    async def _poll_servers(self) -> None:
        """Query all servers periodically, and at once when a page is opened."""
        while True:
            self._is_opened.clear()
            try:
                await self._update()
            except Exception:  # a bug must not leave a page without data
                logger.exception("updating the page's data failed")
            if not self._is_opened.is_set():
                self._has_data.set()
            interval_s = self._interval_s
            if not self._is_watched:
                interval_s = max(interval_s, HISTORY_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._is_opened.wait()

    async def _update(self) -> None:
        """Query all servers once, and add a point."""
        rows: dict[Server, ServerRow] = {}
        for server in self._fleet.servers:
            rows[server] = self._servers.get(server) or ServerRow()
        self._servers = rows
        await asyncio.gather(*(self._query(server, rows[server]) for server in rows))
        for request in self._running.values():
            has_bytes = request.trace.first_byte_s is not None
            progress = (len(request.trace.legs), has_bytes)
            if progress != request.progress:
                request.progress = progress
                request.changed = self._next_change()
        for server, server_row in self._servers.items():
            row = _row(server, server_row)
            if row != server_row.row:
                server_row.row = row
                server_row.changed = self._next_change()
        self._add_point()

    async def _query(self, server: Server, row: ServerRow) -> None:
        """Query one server for its statistics, and store the result in `row`."""
        row.problem = "not ready"
        before = row.stats
        row.stats = ServerStats(before.server, {}, [], before.next)
        if not server.health.ready:
            return
        if server.health.is_foreign:
            row.problem = "it speaks vLLM's dialect, and reports no statistics"
            return
        path = f"{STATS_PATH}?since={before.next}"
        try:
            async with within(POLL_TIMEOUT_S):
                response = await self._upstream.send(
                    server.url, "GET", path, headers=[]
                )
                row.stats = _decode(await response.read())
        except (UpstreamError, TimeoutError):
            row.problem = f"no statistics within {POLL_TIMEOUT_S:g} s"
        except msgspec.DecodeError:
            row.problem = f"GET {STATS_PATH} answers with status {response.status}"
        else:
            row.problem = ""
            self._add_finished(server.name, row.stats.served)

    def _add_finished(self, name: str, finished: Iterable[FinishedRequest]) -> None:
        """Store a server's reports about finished requests that this proxy has sent."""
        for served in finished:
            request = self._requests_by_id.get(served.id)
            if request is None:
                continue
            if any(name == tried for tried, _ in request.trace.legs):
                request.served[name] = served
                request.changed = self._next_change()

    def _add_point(self) -> None:
        """Add a point: sums of the servers' statistics, by kind of server."""
        sums = {kind.value: Counter[str]() for kind in Kind}
        for server, row in self._servers.items():
            # A server with role "both" is two members, but counts only as the decode
            # server.
            is_counted = server.kind is Kind.DECODE
            if is_counted or not self._fleet.find(Kind.DECODE, server.url):
                sums[server.kind.value].update(row.stats.values)
        self.points.add(
            self._next_change(),
            sums=sums,
            servers=[
                server.name for server, row in self._servers.items() if row.stats.values
            ],
            totals={"open": len(self._running), **self._totals},
            is_watched=self._is_watched,
        )

    def _next_change(self) -> int:
        self._num_changes += 1
        return self._num_changes


def _row(server: Server, server_row: ServerRow) -> Row:
    """Return a server's row on the page."""
    health = server.health
    details = server_row.stats.server
    public = {
        name: value
        for name, value in details.items()
        if not name.startswith("side_channel")
    }
    models = health.models
    if not models and "model" in details:
        models = (details["model"],)
    reason = _ADDRESS.sub("…", health.reason)
    if health.ready:
        reason = server_row.problem
    return {
        **public,
        "role": server.kind.value,
        "state": server.state,
        "models": models,
        "reason": reason,
        "circuit": server.circuit,
        "in_flight": server.in_flight,
        "values": server_row.stats.values,
    }
