"""Numbers in JSON are passed on with the text that the client wrote."""

import json
from typing import Any

import msgspec
import pytest

from protocol import exact_json
from protocol.exact_json import ExactFloat

NUMBERS = (
    "0", "-1", "1234567890123456789012345678901234567890", "0.1", "-2.5", "1e5",
    "1E400", "-1e-400", "0.30000000000000004441", "1e-320", "1e99999999999999999999",
    "123456789012345.6",
)  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
def test_encoded_number_equals_the_decoded_number(text):
    nested = f'{{"a": [{text}, "é", null, {{"b": {text}}}], "c": true}}'
    for value in (exact_json.decode(nested.encode()), exact_json.loads(nested)):
        written = exact_json.dumps(value)
        assert written == nested or json.loads(written) == json.loads(nested)
        is_exact = isinstance(value["a"][0], ExactFloat)
        assert not is_exact or written == nested
        kinds: tuple[Any, ...] = (int, float)
        assert isinstance(value["a"][0], kinds)


@pytest.mark.parametrize(
    "text", ["0.1", "1.5", "1e22", "100.0", "5e-324", "1.7976931348623157e308"]
)
def test_number_that_float64_preserves_is_a_plain_float(text):
    assert type(exact_json.decode(text.encode())) is float
    assert type(exact_json.loads(text)) is float


def test_text_that_is_not_json_is_refused():
    for text in (b"{", b"[NaN]", b"\xff"):
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            exact_json.decode(text)
    assert exact_json.loads("[NaN]") != []
    with pytest.raises(ValueError, match="NaN"):
        exact_json.loads("[NaN]", allow_nan=False)
