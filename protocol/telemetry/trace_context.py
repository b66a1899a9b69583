"""The W3C trace context of a request: which trace and which span it belongs to.

A process reads the context from the header `traceparent` of a request. In its own
requests to other processes, this header names one of its spans as the parent. The id of
a span is drawn when the span starts, because other processes need the id before the
span is recorded; see tracer.py.
"""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

# Trace id, span id and flags. Later versions may append fields.
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_MAX_STATE_BYTES = 512  # a longer tracestate is dropped, as the standard allows
_SAMPLED = 1


@dataclass(frozen=True)
class TraceContext:
    """The identity of one span of a trace.

    Attributes:
        is_sampled: Whether the spans of this trace are recorded.
        state: The value of the header `tracestate`, which is forwarded unchanged; empty
            without this header, or if it was too long.
    """

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""

    @property
    def trace_id_text(self) -> str:
        return f"{self.trace_id:032x}"

    def child(self) -> "TraceContext":
        """Returns the context of a new span below this one."""
        return replace(self, span_id=new_span_id())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers that make this span the parent of a span in another
        process.
        """
        flags = _SAMPLED if self.is_sampled else 0
        value = f"00-{self.trace_id_text}-{self.span_id:016x}-{flags:02x}"
        headers = [(b"traceparent", value.encode())]
        if self.state:
            headers.append((b"tracestate", self.state.encode("latin-1")))
        return headers


def new_trace_id() -> int:
    """Returns a random id of 128 bits."""
    return random.getrandbits(128) or 1  # 0 is not a valid id


def new_span_id() -> int:
    """Returns a random id of 64 bits."""
    return random.getrandbits(64) or 1


def context_from(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Returns the context in the headers of a request.

    The result is None if there is no valid `traceparent`.
    """
    fields = dict(headers)
    parts = _TRACEPARENT.fullmatch(fields.get(b"traceparent", b"").strip())
    if parts is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in parts.groups())
    if not (trace_id and span_id):
        return None
    state = fields.get(b"tracestate", b"").strip()
    if len(state) > _MAX_STATE_BYTES:
        state = b""
    return TraceContext(
        trace_id, span_id, bool(flags & _SAMPLED), state.decode("latin-1")
    )
