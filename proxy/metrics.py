"""The proxy's metrics: its lines of protocol.metrics, and what only it counts."""

from prometheus_client import Counter

from protocol.metrics import Metrics
from proxy.health import Health
from proxy.membership import Server


class ProxyMetrics(Metrics):
    """One proxy's metrics. A reason is one word: see retry.Failure and flow.Flow."""

    def __init__(self) -> None:
        super().__init__("proxy")
        self._stripped = Counter(
            "baton_proxy_stripped_kv_transfer_params",
            "Requests whose client had sent kv_transfer_params, which were dropped.",
            registry=self._registry,
        )

    def stripped(self) -> None:
        self._stripped.inc()

    def routed(self) -> None:
        """A request goes through both servers."""
        self.inc("baton_proxy_requests", path="pd", reason="routed")

    def refused(self, status: int) -> None:
        """A prefill server refused a request; no decode server was asked."""
        self.inc("baton_proxy_requests", path="prefill", reason=f"status_{status}")

    def decode_only(self, reason: str) -> None:
        """A decode server has to serve a request alone."""
        self.inc("baton_proxy_requests", path="decode_only", reason=reason)

    def ready_changed(self, server: Server, health: Health) -> None:
        self.set(
            "baton_proxy_upstream_ready",
            float(health.ready),
            role=server.kind.value,
            url=server.url,
        )

    def in_flight(self, server: Server, change: int) -> None:
        self.inc("baton_proxy_upstream_in_flight", change, role=server.kind.value, url=server.url)
