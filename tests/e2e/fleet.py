"""A fleet of servers in which tests cause faults.

Relays in front of the decode servers can cut connections and hold requests.
"""

import contextlib
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests import stopping
from tests.rigs.client import TIMEOUT_S
from tests.rigs.cluster import (
    Server,
    assert_idle,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)
from tests.rigs.cutter import Cutter, Hold
from tests.rigs.plain_http import http

_FAST_HEALTH_CHECKS = ("--health-interval-s", "0.1", "--health-timeout-s", "0.5")
# Matches fields that may differ between two answers to the same request, each with an
# adjacent comma. `baton_kv` is one of them, because it is in the last event, and which
# of several speculating choices ends last may vary.
_VARYING_FIELD = (
    r'"(?:id|item_id|created|created_at|baton_kv|accepted_prediction_tokens|'
    r'rejected_prediction_tokens)":(?:"[^"]*"|\d+|\{[^}]*\})'
)
VARYING_FIELDS = re.compile(f",{_VARYING_FIELD}|{_VARYING_FIELD},?")
CACHED_TOKENS = re.compile(r'"cached_tokens":\d+')


@dataclass
class Fleet:
    """One prefill server, decode servers behind relays, and the proxy.

    Attributes:
        cutters: the relays in front of the decode servers, in the same order as
            `decodes`.
        replacements: exit stack that ends the replacement servers when it is closed.
        stopped: pids of the processes that a fault has suspended.
    """

    prefill: Server
    decodes: list[Server]
    cutters: list[Cutter]
    proxy: Server
    start_replacement: Callable[[], Server]
    replacements: contextlib.ExitStack
    holds: dict[bytes, Hold]
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))
    restarts: list[Future[None]] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)

    def server_of(self, cutter: Cutter) -> Server:
        return self.decodes[self.cutters.index(cutter)]

    def request(self, path: str, body: dict[str, Any], hold: Hold | None = None) -> str:
        """Send a request. Return the text of the answer without VARYING_FIELDS."""
        name = uuid.uuid4().hex
        if hold is not None:
            self.holds[name.encode()] = hold
        answer = http.post(
            f"{self.proxy.url}{path}",
            json=body,
            timeout=TIMEOUT_S,
            headers={"x-request-id": name},
        )
        assert answer.status_code == 200, answer.text
        return VARYING_FIELDS.sub("", answer.text)

    @contextlib.contextmanager
    def single_decode_server(self) -> Iterator[Cutter]:
        """Drain all decode servers except one, so that it gets all requests of this
        block. Yield that server's relay.
        """
        response = http.get(f"{self.proxy.url}/ready", timeout=10)
        is_ready = response.json()["servers"]
        names = [f"decode-{index}" for index in range(len(self.decodes))]
        chosen = next(
            name
            for index, name in enumerate(names)
            if is_ready[name] and self._serves(index)
        )
        self._for_all_others(chosen, "drain")
        try:
            yield self.cutters[names.index(chosen)]
        finally:
            self._for_all_others(chosen, "undrain")

    def _serves(self, index: int) -> bool:
        """Return True if the decode server at this index is ready.

        Query the server itself, because the proxy may not have noticed yet that the
        server is lost.
        """
        with contextlib.suppress(httpx.TransportError):
            response = http.get(f"{self.cutters[index].url}/ready", timeout=5)
            return response.status_code == 200
        return False

    def _for_all_others(self, chosen: str, action: str) -> None:
        """Drain or undrain (`action`) all decode servers except the chosen one."""
        for index in range(len(self.decodes)):
            name = f"decode-{index}"
            if name != chosen:
                url = f"{self.proxy.url}/admin/members/{action}"
                assert http.post(url, json={"server": name}).status_code == 200

    def num_failovers(self) -> float:
        """Return the number of requests that a decode server took over from a lost one,
        so far.
        """
        metrics = self.proxy.metrics()
        resumes = (n for name, n in metrics.items() if 'outcome="resumed"' in name)
        return sum(resumes) + metrics['baton_proxy_retries_total{leg="decode"}']

    def until_ready(self, min_servers: int) -> None:
        def is_ready() -> bool:
            report = http.get(f"{self.proxy.url}/ready", timeout=10).json()
            return bool(report["decode"]["ready"] >= min_servers)

        wait_until(is_ready, 60)

    def replace(self, cutter: Cutter) -> None:
        """Start, in the background, a server that replaces this relay's server, which
        is ending.
        """
        index = self.cutters.index(cutter)

        def begin() -> None:
            successor = self.start_replacement()
            self.replacements.enter_context(running(successor))
            assert self.decodes[index].child.exited.wait(30)
            self.decodes[index] = successor
            cutter.target = successor.port

        self.restarts.append(self.pool.submit(begin))

    def release_holds(self) -> None:
        """Release all held requests."""
        for hold in self.holds.values():
            hold.go.set()

    def resume(self) -> None:
        self.release_holds()
        self.holds.clear()
        for cutter in self.cutters:
            cutter.mend()
        for pid in self.stopped:
            stopping.send(pid, signal.SIGCONT)
        self.stopped.clear()

    def assert_idle(self) -> None:
        """Wait for all replacements. Assert that no server holds a block of a finished
        request.
        """
        for restart in self.restarts:
            restart.result()
        self.restarts.clear()
        assert_idle(*self.decodes, self.prefill)


@contextlib.contextmanager
def start_fleet(model: Path, num_decodes: int) -> Iterator[Fleet]:
    """Run a fleet until the block ends. Every second decode server speculates."""
    decode = partial(start_decode, model, "--shutdown-grace-s", "0.1")
    speculating = partial(decode, "--speculate", "ngram:6")
    starts = [speculating if index % 2 else decode for index in range(num_decodes)]
    with started(partial(start_prefill, model), *starts) as (prefill, *decodes):
        holds: dict[bytes, Hold] = {}
        cutters = [Cutter(server.port, holds) for server in decodes]
        argv = [arg for cutter in cutters for arg in ("--decode", cutter.url)]
        proxy = start_proxy([prefill], [], *argv, *_FAST_HEALTH_CHECKS)
        with running(proxy), contextlib.ExitStack() as replacements:
            fleet = Fleet(prefill, decodes, cutters, proxy, decode, replacements, holds)
            replacements.callback(fleet.pool.shutdown)
            yield fleet
            fleet.assert_idle()
            for cutter in cutters:
                cutter.close()


# -- faults


def _break_connections(fleet: Fleet, cutter: Cutter) -> None:
    cutter.cut()
    cutter.mend()


def _suspend(fleet: Fleet, cutter: Cutter) -> None:
    server = fleet.server_of(cutter)
    pids = (*server.engine_pids(), server.child.pid)
    fleet.stopped.extend(pids)
    for pid in pids:
        stopping.send(pid, signal.SIGSTOP)


def kill(fleet: Fleet, cutter: Cutter) -> None:
    fleet.server_of(cutter).kill()
    fleet.replace(cutter)


def _terminate(fleet: Fleet, cutter: Cutter) -> None:
    fleet.server_of(cutter).child.signal(signal.SIGTERM)
    fleet.replace(cutter)


def _silence(fleet: Fleet, cutter: Cutter) -> None:
    cutter.swallow()


FAULTS = {
    "kill": kill,
    "cut": _break_connections,
    "SIGTERM": _terminate,
    "SIGSTOP": _suspend,
    "silence": _silence,
}


_INDEX = re.compile(r'"choices":\[\{"index":(\d)')


def by_choice(stream: str) -> str:
    """Sort events by choice, because the order of choices in a stream may vary."""
    events = stream.split("\n\n")
    return "\n\n".join(
        sorted(events, key=lambda event: (_INDEX.findall(event) or ["9"])[0])
    )
