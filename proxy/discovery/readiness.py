"""Decides whether the proxy reports that it is ready, and which servers are missing.

A decode server alone can answer every request, but then the request is not
disaggregated. Therefore, for each model of a decode server, the proxy first waits for a
prefill server as well:

    WAITING --a ready decode server can read a ready prefill server's KV----> STARTED
            --no prefill server of the model is expected-------------------->
            --`--prefill-wait-s` has passed, or `--disaggregate never`------>

Once every such model has started, one ready decode server is enough. The loss of all
prefill servers only makes answers slower, so a load balancer must not remove the proxy.
Readiness reads the file of servers when it is created; it does no other I/O.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from protocol.process.logging import get_logger
from protocol.settings.settings import ProxySettings
from protocol.short_repr import short_repr
from proxy.discovery.sources import BadFile, read_servers
from proxy.membership import Fleet, Kind, Pool

logger = get_logger(__name__)

DEFAULT_WAIT_S = 600.0  # as long as `baton up` waits for its servers


class ReadyReport(NamedTuple):
    """The answer to a readiness probe.

    Attributes:
        missing: sentences about missing servers. The proxy may be ready nevertheless.
    """

    is_ready: bool
    missing: list[str]


class Readiness:
    """The readiness of one proxy.

    Args:
        clock: returns monotonic seconds. The wait for prefill servers starts when this
            object is created.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: ProxySettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._is_wait_over = settings.disaggregate == "never"
        # Models in state STARTED: `update` once found no gap for them (see `_gaps`). ""
        # stands for servers that report no models.
        self._started_models: set[str] = set()
        # A prefill server that the configuration names is expected before it is a
        # member, because its DNS name may have no addresses yet. If the user has set
        # --prefill-wait-s, a prefill server is expected to register.
        self._is_prefill_named = _names_prefill_server(settings)
        self._has_explicit_wait = bool(settings.prefill_wait_s)
        wait_s = settings.prefill_wait_s
        self._wait_s = DEFAULT_WAIT_S if wait_s is None else wait_s
        self._deadline = clock() + self._wait_s

    def update(self) -> None:
        """Record which models have started, and end the wait at its deadline.

        Call this method after every health check: a server that is ready now may have
        left before the next readiness probe.
        """
        if self._is_wait_over:
            return
        gaps = self._gaps()
        self._started_models.update(model for model, gap in gaps.items() if not gap)
        if self._clock() < self._deadline or not gaps:
            return
        self._is_wait_over = True
        lasting_gaps = [
            gap for model, gap in gaps.items() if model not in self._started_models
        ]
        if lasting_gaps:
            logger.warning(
                "%s within %g s (--prefill-wait-s); GET /ready no longer waits for "
                "this, and decode servers compute the prompts. Check the prefill "
                "servers.",
                "; ".join(lasting_gaps),
                self._wait_s,
            )

    def report(self) -> ReadyReport:
        """Call `update`; return whether the proxy is ready, and what is missing.

        The proxy is ready if requests would be served. Until a model has started, its
        requests must also be disaggregated, if prefill servers are expected.
        """
        self.update()
        gaps = self._gaps()
        missing = [
            f"no {kind.value} server is ready"
            for kind in Kind
            if not self._fleet.ready(kind)
        ]
        missing += [gap for gap in gaps.values() if gap and gap not in missing]
        has_started = self._is_wait_over or gaps.keys() <= self._started_models
        return ReadyReport(bool(gaps) and has_started, missing)

    def _gaps(self) -> dict[str, str]:
        """Return each model's gap: why its requests would not be disaggregated.

        The models are those of ready decode servers. A gap is a sentence. It is empty
        if requests would be disaggregated, or if no prefill server is expected.
        """
        ready = self._fleet.ready(Kind.DECODE)
        if not ready:
            return {}
        names = sorted({name for server in ready for name in server.health.models})
        if not names:
            return {"": self._gap(self._fleet, "")}
        has_one_model = len(names) == 1
        return {
            name: self._gap(
                self._fleet.pool(name),
                "" if has_one_model else f" of model {short_repr(name, 200)}",
            )
            for name in names
        }

    def _gap(self, pool: Pool, model_phrase: str) -> str:
        """Return the gap of the servers in `pool`; empty if there is none."""
        if pool.paired().ready(Kind.PREFILL) or not self._expects_prefill(pool):
            return ""
        if pool.ready(Kind.PREFILL):
            return (
                f"no prefill server{model_phrase} has KV that a ready decode server "
                "can read"
            )
        return f"no prefill server{model_phrase} is ready"

    def _expects_prefill(self, pool: Pool) -> bool:
        if self._has_explicit_wait or any(
            server.sources and not server.drained
            for server in pool.by_kind[Kind.PREFILL]
        ):
            return True
        return self._is_prefill_named and not self._fleet.by_kind[Kind.PREFILL]


def _names_prefill_server(settings: ProxySettings) -> bool:
    """Return whether the command line or the file of servers names a prefill server."""
    if settings.prefill or settings.servers_file is None:
        return bool(settings.prefill)
    try:
        return bool(read_servers(settings.servers_file).get(Kind.PREFILL))
    except BadFile:  # Discovery reads the file again and reports the error
        return False
