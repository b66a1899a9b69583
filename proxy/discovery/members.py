"""The members of one proxy: who they are, how each is, and what is shown of that."""

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
from proxy.discovery import admin
from proxy.discovery.registry import MAX_RECORD_BYTES, Registry
from proxy.discovery.sources import Discovery
from proxy.health import CIRCUITS, Health
from proxy.knowledge import Knowledge
from proxy.membership import Fleet, Kind, Server, Watch
from proxy.poller import Poller
from proxy.relay import Reply
from proxy.upstream import HttpUpstream

logger = get_logger(__name__)

MODELS_PATH = "/v1/models"
SERIES = ("ready", "circuit", "in_flight")  # of each member
_DIGITS = re.compile(r"\d+")


class Members:
    """A fleet, its checks and where its members come from; lives on one event loop.

    Args:
        on_silence: see Watch.
    """

    open_paths = frozenset((Registry.path,))  # signed
    paths = open_paths | {*admin.ADMIN_PATHS}
    read_paths = (admin.MEMBERS_PATH,)  # of those

    def __init__(
        self,
        settings: ProxySettings,
        upstream: HttpUpstream,
        metrics: Metrics,
        on_silence: Callable[[Server, bool], None],
    ) -> None:
        self._metrics = metrics
        self.knowledge = Knowledge(
            settings.routing,
            settings.disaggregate,
            max_blocks=settings.prefix_blocks,
            step_s=settings.itl_target_s,
        )
        self._is_ending = False
        self._created = int(time.time())
        watch = Watch(
            self._joins, self._has_left, self._changed, self._circuit, on_silence
        )
        self.fleet = Fleet(watch=watch)
        self._poller = Poller(self.fleet, upstream, self.knowledge, settings)
        self.readiness = self._poller.readiness
        self._discovery = Discovery(self.fleet, settings)
        secret = settings.cluster_secret
        key = None if secret is None else secret.get_secret_value().encode()
        self._registry = Registry(self.fleet, key)

    def start(self) -> None:
        self._discovery.start()

    def end(self) -> None:
        """With the proxy servers may end unremarked, and who can register no more stays."""
        self._is_ending = True
        self._registry.close()

    async def close(self) -> None:
        self._registry.close()
        await self._discovery.close()
        await self._poller.close()

    async def answer(self, scope: dict[str, Any], receive: Any, reply: Reply) -> None:
        """Answers a POST to one of `paths`, or a GET to one of `read_paths`. Raises BatonError."""
        path, is_read = scope["path"], scope["method"] != "POST"
        read = partial(read_body, scope, receive, is_held=False)
        if path == Registry.path:  # signed
            told = self._registry.take(await read(MAX_RECORD_BYTES))
        else:
            check_operator(scope)
            body = b"" if is_read else await read(admin.MAX_BODY_BYTES)
            told = (
                admin.members(self.fleet)
                if is_read
                else admin.change(self.fleet, path, body)
            )
        await reply.answer_json(200, told)

    def models(self, path: str) -> dict[str, Any] | None:
        """The body of /v1/models, of all servers together, or of /v1/models/NAME; None of other
        paths, and of names that no server has told."""
        lengths = {
            name: self.fleet.pool(name).context(Kind.DECODE)
            for name in self.fleet.models
        }
        cards = {
            name: model_card(name, self._created, n) for name, n in lengths.items()
        }
        if path == MODELS_PATH and cards:
            return {"object": "list", "data": [*cards.values()]}
        return cards.get(path.removeprefix(MODELS_PATH + "/"))

    def show(self) -> None:
        """Tells the metrics how each member is."""
        for server in self.fleet.servers:
            told = server.health.ready, CIRCUITS.index(server.circuit), server.in_flight
            for name, value in zip(SERIES, told, strict=True):
                self._metrics.set(
                    f"baton_proxy_upstream_{name}", value, **server.labels
                )

    # what the fleet tells

    def _joins(self, server: Server) -> None:
        for twin in [
            s for s in self.fleet.servers if s.url == server.url and s is not server
        ]:
            self.knowledge.are_one(server, twin)
        self._poller.watch(server)
        logger.info("%s joins (%s)", server, ", ".join(server.sources))

    def _has_left(self, server: Server) -> None:
        self._poller.leave(server)
        self.knowledge.left(server)
        for name in SERIES:
            self._metrics.end(f"baton_proxy_upstream_{name}", **server.labels)
        logger.info("%s has left", server)

    def _circuit(self, server: Server) -> None:
        if server.circuit != "half_open":
            logger.warning("the circuit of %s is %s", server, server.circuit)

    def _changed(self, server: Server, old: Health, new: Health) -> None:
        if new.ready:
            logger.info("%s is ready", server)
            return
        self.knowledge.forget(server)
        if old.ready:
            self._poller.hurry(server)
        # All may end together, one that leaves was to, and one that starts tells how far it is.
        is_as_before = not old.ready and _DIGITS.sub("", old.reason) == _DIGITS.sub(
            "", new.reason
        )
        is_expected = self._is_ending or not server.sources or is_as_before
        level = logging.DEBUG if is_expected else logging.WARNING
        logger.log(level, "%s is not ready: %s", server, new.reason)
