"""Whether the proxy reports that it is ready, and what it waits for until then.

A decode server alone can answer every request, but without its prefill server the
answer is not disaggregated. The proxy waits for both, for each model of a decode
server:

    WAITING --a ready decode server can read a ready prefill server's KV----> STARTED
            --no prefill server of the model is expected-------------------->
            --`--prefill-wait-s` has passed, or `--disaggregate never`------>

Once every such model has started, one ready decode server is enough. The loss of all
prefill servers makes answers slower, and must not take the endpoint out of a load
balancer. Does no I/O after its construction.
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
        missing: what no server provides now, as sentences; some may be optional.
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
        self._is_over = settings.disaggregate == "never"
        # Models that have started; "" for servers that do not report their models.
        self._started: set[str] = set()
        # Prefill servers may be expected although none is a member yet: a DNS name may
        # have no addresses, and with an explicit wait a server may still register.
        self._names_prefill = _names_prefill(settings)
        self._needs_prefill = bool(settings.prefill_wait_s)
        wait_s = settings.prefill_wait_s
        self._wait_s = DEFAULT_WAIT_S if wait_s is None else wait_s
        self._deadline = clock() + self._wait_s

    def update(self) -> None:
        """End the wait for prefill servers as soon as its condition holds.

        Call it after every health check: a server that is ready now may have left at
        the next readiness probe.
        """
        if self._is_over:
            return
        gaps = self._gaps()
        self._started.update(model for model, gap in gaps.items() if not gap)
        if self._clock() < self._deadline:
            return
        self._is_over = True
        unstarted = [gap for model, gap in gaps.items() if model not in self._started]
        if unstarted:
            logger.warning(
                "%s within %g s (--prefill-wait-s); GET /ready is 200 from now on, and "
                "decode servers compute the prompts. Check the prefill servers.",
                "; ".join(unstarted),
                self._wait_s,
            )

    def report(self) -> ReadyReport:
        """Return whether requests would be served.

        Until a model has started, its requests must also be disaggregated, if prefill
        servers are expected.
        """
        self.update()
        gaps = self._gaps()
        missing = [
            f"no {kind.value} server is ready"
            for kind in Kind
            if not self._fleet.ready(kind)
        ]
        missing += [gap for gap in gaps.values() if gap and gap not in missing]
        has_started = self._is_over or gaps.keys() <= self._started
        return ReadyReport(bool(gaps) and has_started, missing)

    def _gaps(self) -> dict[str, str]:
        """Return why requests would not be disaggregated, for each model.

        The models are those of ready decode servers. The reason is a sentence. It is
        empty if requests would be disaggregated, or if decode-only is intended.
        """
        ready = self._fleet.ready(Kind.DECODE)
        if not ready:
            return {}
        names = sorted({name for server in ready for name in server.health.models})
        if not names:
            return {"": self._gap(self._fleet, "")}
        is_one = len(names) == 1
        return {
            name: self._gap(
                self._fleet.pool(name),
                "" if is_one else f" of model {short_repr(name, 200)}",
            )
            for name in names
        }

    def _gap(self, pool: Pool, of_model: str) -> str:
        if pool.paired().ready(Kind.PREFILL) or not self._expects_prefill(pool):
            return ""
        if pool.ready(Kind.PREFILL):
            return (
                f"no prefill server{of_model} has KV that a ready decode server can "
                "read"
            )
        return f"no prefill server{of_model} is ready"

    def _expects_prefill(self, pool: Pool) -> bool:
        if self._needs_prefill or any(
            server.sources and not server.drained for server in pool.of[Kind.PREFILL]
        ):
            return True
        return self._names_prefill and not self._fleet.of[Kind.PREFILL]


def _names_prefill(settings: ProxySettings) -> bool:
    """Return whether the command line or the file of servers names a prefill server."""
    if settings.prefill or settings.servers_file is None:
        return bool(settings.prefill)
    try:
        return bool(read_servers(settings.servers_file).get(Kind.PREFILL))
    except BadFile:  # reported by the discovery, which reads it again
        return False
