"""Server-sent events survive any cut of the byte stream."""

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import TransferFailed
from protocol.http import sse


def parse(data: bytes) -> list[tuple[str, str]]:
    return sse.SSEParser().feed(data)


def test_an_event_comes_back() -> None:
    assert parse(sse.event(b'{"a":1}') + sse.DONE) == [
        ("message", '{"a":1}'),
        ("message", "[DONE]"),
    ]


def test_an_error_event_has_its_name_and_openai_s_shape() -> None:
    ((name, data),) = parse(sse.error_event(TransferFailed("cut off")))
    assert name == "error"
    assert json.loads(data)["error"]["code"] == "transfer_failed"


def test_the_rules_of_the_standard() -> None:
    stream = b": comment\r\nevent: x\r\ndata: a\r\ndata:b\r\nid: 3\r\n\r\ndata: c\r\rdata: cut"
    assert parse(stream) == [("x", "a\nb"), ("message", "c")]


def test_an_event_without_data_is_none() -> None:
    assert parse(b"event: x\n\ndata\n\n") == [("message", "")]


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))),
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_cuts_do_not_matter(texts: list[str], cuts: list[int], line_end: bytes) -> None:
    stream = b"".join(sse.event(text.encode()) for text in texts).replace(b"\n", line_end)
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    parser = sse.SSEParser()
    found = [event for a, b in itertools.pairwise(edges) for event in parser.feed(stream[a:b])]
    if line_end == b"\r":
        found += parser.feed(b"\n")  # a lone CR at the end waits to see whether a LF follows
    assert found == [("message", text) for text in texts]
