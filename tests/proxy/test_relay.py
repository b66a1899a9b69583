"""Events cut anywhere, and headers that stop here."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import EngineDied
from protocol.http import sse
from proxy.relay import EventBuffer, end_to_end

STREAM = (
    b'data: {"n": 1}\n\n: ping\r\n\r\ndata: a\ndata: b\n\nevent: x\ndata: c\n\ndata: [DONE]\n\n'
)

ENDS = [found.end() for found in re.finditer(rb"\n\n|\r\n\r\n", STREAM)]


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_events_pass_whole_and_unchanged_however_they_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    events = EventBuffer()
    passed: list[bytes] = []
    for a, b in itertools.pairwise(edges):
        passed.append(events.feed(STREAM[a:b]))
        whole = [end for end in ENDS if end <= b]
        assert sum(map(len, passed)) == (whole[-1] if whole else 0)
    assert b"".join(passed) == STREAM
    assert all(piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in passed if piece)
    assert events.rest() == b""
    assert events.has_ended


def test_a_whole_event_is_not_held_back() -> None:
    events = EventBuffer()
    assert events.feed(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert events.feed(b"\n\n") == b"data: 2\n\n"


@pytest.mark.parametrize(
    ("stream", "ended"),
    [
        (b"", False),
        (b"data: 1\n\n", False),
        (b"data: 1\n\ndata: [DONE]\n\n", True),
        (b"data: [DONE]", True),  # no newline after it: some servers
        (b"data: [DONE]\r\n\r\n", True),
        (b'data: {"text": "[DONE]"}\n\n', False),
        (b"data: 1\n\n" + sse.error_event(EngineDied("gone")), True),
        (b'data: {"error": {"message": "x"}}\n\n', True),
        (b'data: {"error": 1}\n\ndata: 2\n\n', False),
        (b'event: response.created\ndata: {"response":{"error":null}}\n\n', False),
        (b'data: 1\n\nevent: response.completed\ndata: {"response":{}}\n\n', True),
        (b'event: response.created\ndata: {"response":{"schema":{"error":{"type":1}}}}\n\n', False),
        (b'data: {"object":"chunk","schema":{"error":{}}}\n\n', False),
    ],
)
def test_a_stream_has_ended_when_its_last_event_says_so(stream: bytes, ended: bool) -> None:
    events = EventBuffer()
    events.feed(stream)
    events.rest()
    assert events.has_ended is ended


@pytest.mark.parametrize(
    ("stream", "failed"),
    [
        (b"data: 1\n\ndata: [DONE]\n\n", False),
        (b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n', False),
        (b'data: 1\n\ndata: {"error": {"message": "x"}}\n\n', True),
        (b"data: 1\n\n" + sse.error_event(EngineDied("gone")), True),
        (b'event: response.failed\ndata: {"response":{}}\n\n', True),
        (b'data: {"object":"error",\r\ndata: "error":{"message":"x"}}\r\n\r\n', True),
        (b'event: response.completed\ndata: {"response":{"error":null}}\n\n', False),
        (b'event: response.completed\ndata: {"response":{"schema":{"error":{}}}}\n\n', False),
    ],
)
def test_a_stream_has_failed_when_its_last_event_is_an_error(stream: bytes, failed: bool) -> None:
    events = EventBuffer()
    events.feed(stream)
    assert events.has_failed is failed and events.has_ended


def test_headers_of_the_connection_are_not_relayed() -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"5"),
        (b"transfer-encoding", b"chunked"),
        (b"connection", b"close"),
        (b"date", b"now"),
        (b"x-request-id", b"theirs"),
        (b"x-baton-kv", b"transferred=1, recomputed=0, skipped=0"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]
    assert end_to_end(headers) == [headers[0], *headers[6:]]
