"""Creates the Upstreams, which send the legs of requests, from the proxy's settings."""

from protocol.metrics import Metrics
from protocol.settings.server_options import RESUME_WAIT_S
from protocol.settings.settings import ProxySettings
from proxy.discovery.members import Members
from proxy.failover import signing_secret
from proxy.legs.series import initial_series
from proxy.legs.upstreams import Upstreams
from proxy.upstream import HttpUpstream


def create_upstreams(
    settings: ProxySettings, metrics: Metrics, members: Members, upstream: HttpUpstream
) -> Upstreams:
    """Return the Upstreams, and expose the initial metric series with the value 0."""
    for name, labels in initial_series():
        metrics.expose_series(name, **labels)
    return Upstreams(
        fleet=members.fleet,
        upstream=upstream,
        metrics=metrics,
        load_tracker=members.load_tracker,
        max_queue_s=settings.max_queue_s,
        max_resumes=settings.max_resumes,
        resume_wait_s=settings.resume_wait_s or RESUME_WAIT_S,
        restart_wait_s=settings.resume_wait_s or 0.0,
        secret=signing_secret(settings),
    )
