"""The size and depth of a JSON text are counted correctly without decoding it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest, PayloadTooLarge
from protocol.http import json_bounds
from protocol.http.json_bounds import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_TOP_MEMBERS,
    Structure,
    check_bounds,
    check_utf8,
    structure_of,
)

TEXT = st.text(alphabet='a"\\{}[]:,é\n', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
    ),
    max_leaves=12,
)


def expected_structure(value: Any, depth: int = 1) -> Structure:
    """Returns the structure (counts and depth) of a decoded value.

    Args:
        depth: Number of levels down to the value, including its own level.
    """
    if not isinstance(value, dict | list):
        return Structure(0, 0, depth - 1)
    inner = [
        expected_structure(item, depth + 1)
        for item in (value.values() if isinstance(value, dict) else value)
    ]
    num_members = len(value) if isinstance(value, dict) else 0
    num_nodes = 1 + num_members + sum(structure.num_nodes for structure in inner)
    deepest = max([depth, *(structure.depth for structure in inner)])
    return Structure(num_nodes, num_members, deepest)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 1 << 16])
@given(value=st.dictionaries(TEXT, VALUES, max_size=5), ascii_only=st.booleans())
def test_structure_equals_that_of_the_decoded_value(piece_bytes, value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "_PIECE_BYTES", piece_bytes)
        assert structure_of(text) == expected_structure(value)
        check_utf8(text)


def members(number: int) -> bytes:
    """Returns the JSON text of an object with `number` members."""
    return b"{" + b",".join(b'"%x":0' % index for index in range(number)) + b"}"


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (
            b'{"a":' + members(MAX_NODES) + b"}",
            PayloadTooLarge,
            (MAX_NODES + 3, MAX_NODES),
        ),
        (
            b'{"a":[' + b"{}," * MAX_NODES + b"0]}",
            PayloadTooLarge,
            (MAX_NODES + 3, MAX_NODES),
        ),
        (
            members(MAX_TOP_MEMBERS + 1),
            PayloadTooLarge,
            (MAX_TOP_MEMBERS + 1, MAX_TOP_MEMBERS),
        ),
        (
            b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
            InvalidRequest,
            (MAX_DEPTH + 1,),
        ),
    ],
    ids=["members", "objects", "members of the body", "depth"],
)
def test_error_has_the_number_and_the_limit(body, error, words):
    with pytest.raises(error) as raised:
        check_bounds(body)
    assert all(f" {word}" in raised.value.message for word in words)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + members(MAX_NODES - 3) + b"}",
        b'{"prompt":[' + b"0," * 1_000_000 + b"0]}",
        b'{"prompt":"' + b'{}[]:\\",' * 200_000 + b'"}',
        b'{"prompt":"' + b"\\\\" * 200_000 + b'"}',
        b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}",
    ],
    ids=["members", "numbers", "marks in a string", "backslashes", "depth"],
)
def test_body_within_the_bounds_is_accepted(body):
    check_bounds(body)
