"""Values are shown in error messages as short JSON."""

import sys
from typing import Any

import pytest

from protocol.short_repr import short_repr

DEEP: list[Any] = []
for _ in range(2 * sys.getrecursionlimit()):
    DEEP = [DEEP]
NESTED = {"a": [True, None, {"b": "c"}], "d": 1.5}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        (1.0, "1.0"),
        (1e300, "1e+300"),
        ("it's", '"it\'s"'),
        ('a "b"\n', '"a \\"b\\"\\n"'),
        ("Zürich 東京", '"Zürich 東京"'),
        ("half \ud800", '"half \\ud800"'),
        ("\u202eabc", '"\\u202eabc"'),
        ((0, 1), "[0, 1]"),
        (NESTED, '{"a": [true, null, {"b": "c"}], "d": 1.5}'),
        (b"x", "\"b'x'\""),
        # Long texts are cut:
        ("x" * 78, '"' + "x" * 78 + '"'),
        ("x" * 79, '"' + "x" * 76 + "..."),
        ([[]] * 200, ("[" + "[], " * 20)[:77] + "..."),
        ({"x" * 200: 1}, '{"' + "x" * 75 + "..."),
        (10**200, "1" + "0" * 76 + "..."),
        (DEEP, "[" * 77 + "..."),
    ],
)
def test_value_is_shown_as_json_of_80_characters_or_fewer(value, expected):
    assert short_repr(value) == expected
