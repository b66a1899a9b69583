"""The reasons for which a decode server serves a request alone."""

from dataclasses import dataclass
from enum import Enum

from proxy.upstream import Failure


class DecodeOnlyReason(Enum):
    """The reason why no prefill server takes part in a request.

    The values are labels of baton_proxy_requests and appear in the access log.
    """

    PLACED = "placed"  # a decode server alone was cheaper, or --disaggregate is never
    INCOMPATIBLE = "incompatible"  # no decode server can read prefill servers' KV
    NO_PREFILL_SERVER = "no_prefill_server"
    NO_KV_PARAMS = "no_kv_params"  # missing in the prefill server's answer
    PREFILL_BODY = "prefill_body"  # the body is too large for prefill servers
    PREFILL_CONTEXT = "prefill_context"  # the prompt is too long for prefill servers
    PREFILL_CHOICES = "prefill_choices"  # too many choices for prefill servers
    DECODE_CHOICES = "decode_choices"  # too many choices for decode servers


@dataclass(frozen=True)
class DecodeOnly:
    """The decision to serve a request without a prefill server.

    Attributes:
        reason: a DecodeOnlyReason, or how the last prefill server failed.
    """

    reason: DecodeOnlyReason | Failure

    @property
    def label(self) -> str:
        return str(self.reason.value)

    @property
    def needs_longest_context(self) -> bool:
        return self.reason is DecodeOnlyReason.PREFILL_CONTEXT
