"""The members of one proxy: their sources, their health checks and their metrics."""

import logging
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from protocol.http.access import check_operator
from protocol.http.bodies import read_body
from protocol.metrics import Metrics
from protocol.openai.responses import model_card
from protocol.process.logging import get_logger
from protocol.settings.settings import ProxySettings
from proxy.discovery.admin import AdminApi
from proxy.discovery.registry import MAX_RECORD_BYTES, Registry
from proxy.discovery.sources import Discovery
from proxy.health import CIRCUITS, Health
from proxy.membership import Fleet, Kind, Server, Watch
from proxy.placement.load_tracker import LoadTracker
from proxy.poller import Poller
from proxy.relay import Reply
from proxy.upstream import HttpUpstream

logger = get_logger(__name__)

MODELS_PATH = "/v1/models"
SERIES = ("ready", "circuit", "in_flight")  # metrics baton_proxy_upstream_NAME
_DIGITS = re.compile(r"\d+")


class Members:
    """A fleet, its health checks and the sources of its members.

    Everything runs on one event loop.

    Args:
        on_silence: called for a server that answers no health checks; see Watch.
    """

    open_paths = frozenset((Registry.path,))  # signed requests, which need no key
    paths = open_paths | {*AdminApi.paths}
    read_paths = AdminApi.read_paths  # the paths that also answer GET

    def __init__(
        self,
        settings: ProxySettings,
        upstream: HttpUpstream,
        metrics: Metrics,
        on_silence: Callable[[Server, bool], None],
    ) -> None:
        self._metrics = metrics
        self.load_tracker = LoadTracker(
            settings.routing,
            settings.disaggregate,
            max_blocks=settings.prefix_blocks,
            step_s=settings.itl_target_s,
        )
        self._is_shutting_down = False
        self._created = int(time.time())
        watch = Watch(
            on_join=self._on_join,
            on_left=self._on_left,
            on_change=self._on_change,
            on_circuit=self._on_circuit,
            on_silence=on_silence,
        )
        self.fleet = Fleet(watch=watch)
        self._admin = AdminApi(self.fleet)
        self._poller = Poller(self.fleet, upstream, self.load_tracker, settings)
        self.readiness = self._poller.readiness
        self._discovery = Discovery(self.fleet, settings)
        secret = settings.cluster_secret
        key = None if secret is None else secret.get_secret_value().encode()
        self._registry = Registry(self.fleet, key)

    def start(self) -> None:
        self._discovery.start()

    def begin_shutdown(self) -> None:
        """Keep registrations from expiring; log no more warnings about stopped servers.

        While the proxy shuts down, the servers may be shutting down as well.
        """
        self._is_shutting_down = True
        self._registry.close()

    async def close(self) -> None:
        self._registry.close()
        await self._discovery.close()
        await self._poller.close()

    async def answer(self, scope: dict[str, Any], receive: Any, reply: Reply) -> None:
        """Answer a POST to one of `paths`, or a GET to one of `read_paths`.

        Raises:
            BatonError: the error for the client.
        """
        path = scope["path"]
        read = partial(read_body, scope, receive, is_held=False)
        if path == Registry.path:
            answer = self._registry.take(await read(MAX_RECORD_BYTES))
        else:
            check_operator(scope)
            if scope["method"] == "POST":
                body = await read(self._admin.max_body_bytes(path))
                answer = self._admin.change(path, body)
            else:
                answer = self._admin.read(path)
        await reply.answer_json(200, answer)

    def models_answer(self, path: str) -> dict[str, Any] | None:
        """Return the answer to GET /v1/models, or to /v1/models/NAME.

        None for other paths, and for models that no server reports.
        """
        cards = {}
        for name in self.fleet.models:
            context = self.fleet.pool(name).longest_context(Kind.DECODE)
            cards[name] = model_card(name, self._created, context)
        if path == MODELS_PATH and cards:
            return {"object": "list", "data": [*cards.values()]}
        return cards.get(path.removeprefix(MODELS_PATH + "/"))

    def update_metrics(self) -> None:
        """Set the metrics of each member."""
        for server in self.fleet.servers:
            values = {
                "ready": server.health.ready,
                "circuit": CIRCUITS.index(server.circuit),
                "in_flight": server.in_flight,
            }
            for name, value in values.items():
                self._metrics.set(
                    f"baton_proxy_upstream_{name}", value, **server.labels
                )

    # events of the fleet

    def _on_join(self, server: Server) -> None:
        for other in self.fleet.servers:
            if other.url == server.url and other is not server:
                self.load_tracker.share_load(server, other)
        self._poller.watch(server)
        logger.info("%s joins; source: %s", server, ", ".join(server.sources))

    def _on_left(self, server: Server) -> None:
        self._poller.unwatch(server)
        self.load_tracker.remove(server)
        for name in SERIES:
            self._metrics.remove_series(f"baton_proxy_upstream_{name}", **server.labels)
        logger.info("%s has left", server)

    def _on_circuit(self, server: Server) -> None:
        if server.circuit != "half_open":
            logger.warning("the circuit breaker of %s is %s", server, server.circuit)

    def _on_change(self, server: Server, old: Health, new: Health) -> None:
        if new.ready:
            logger.info("%s is ready", server)
            return
        self.load_tracker.forget_cache(server)
        if old.ready:
            self._poller.hurry(server)
        # The reason of a starting server contains numbers that show its progress. A
        # reason that differs only in these numbers is not worth another warning.
        old_reason = _DIGITS.sub("", old.reason)
        is_same_reason = not old.ready and old_reason == _DIGITS.sub("", new.reason)
        # While the proxy shuts down or this server leaves, no warning is needed.
        is_expected = self._is_shutting_down or not server.sources or is_same_reason
        level = logging.DEBUG if is_expected else logging.WARNING
        logger.log(level, "%s is not ready: %s", server, new.reason)
