"""Relaying of events that arrive in arbitrary pieces, and headers that are not
relayed.
"""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import EngineDied
from protocol.http import sse
from proxy.relay import EventBuffer, end_to_end

STREAM = (
    b'data: {"n": 1}\n\n: hi\r\n\r\ndata: a\ndata: b\n\n'
    b"event: x\ndata: c\n\ndata: [DONE]\n\n"
)
EVENT_ENDS = [match.end() for match in re.finditer(rb"\n\n|\r\n\r\n", STREAM)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_events_are_passed_on_complete_and_unchanged(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    events = EventBuffer()
    passed: list[bytes] = []
    for a, b in itertools.pairwise(edges):
        passed.append(events.feed(STREAM[a:b]))
        complete_ends = [end for end in EVENT_ENDS if end <= b]
        num_complete = complete_ends[-1] if complete_ends else 0
        assert sum(map(len, passed)) == num_complete
    assert b"".join(passed) == STREAM
    assert all(piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in passed if piece)
    assert events.rest() == b""
    assert events.has_ended


_CREATED = b"event: response.created\n"
_COMPLETED = b"event: response.completed\n"


@pytest.mark.parametrize(
    ("stream", "ended", "failed"),
    [
        (b"", False, False),
        (b"data: 1\n\n", False, False),
        (b"data: 1\n\ndata: [DONE]\n\n", True, False),
        (b"data: [DONE]", True, False),  # some servers send no newline after it
        (b"data: [DONE]\r\n\r\n", True, False),
        (b'data: {"text": "[DONE]"}\n\n', False, False),
        (b"data: 1\n\n" + sse.error_event(EngineDied("gone")), True, True),
        (b'data: 1\n\ndata: {"error": {"message": "x"}}\n\n', True, True),
        # vLLM sends [DONE] after an error.
        (b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n', True, True),
        (
            b'data: {"object":"error",\r\ndata: "error":{"message":"x"}}\r\n\r\n',
            True,
            True,
        ),
        (b'data: {"error": 1}\n\ndata: 2\n\n', False, False),
        (b'data: {"object":"chunk","schema":{"error":{}}}\n\n', False, False),
        (_CREATED + b'data: {"response":{"error":null}}\n\n', False, False),
        (
            _CREATED + b'data: {"response":{"schema":{"error":{"type":1}}}}\n\n',
            False,
            False,
        ),
        (
            b"data: 1\n\n" + _COMPLETED + b'data: {"response":{"error":null}}\n\n',
            True,
            False,
        ),
        (_COMPLETED + b'data: {"response":{"schema":{"error":{}}}}\n\n', True, False),
        (b'event: response.failed\ndata: {"response":{}}\n\n', True, True),
    ],
)
def test_last_event_determines_whether_a_stream_has_ended_or_failed(
    stream, ended, failed
):
    events = EventBuffer()
    for piece in stream.partition(b"data: [DONE]"):
        events.feed(piece)
    events.rest()
    assert (events.has_ended, events.has_failed) == (ended, failed)


def test_headers_of_the_connection_are_not_relayed():
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
