"""Reading a request body before anything is known of it."""

import gc

import pytest

from protocol.errors import InvalidRequest
from protocol.openai import parse_json_object


@pytest.mark.parametrize("body", [b'{"prompt": [' + b"[]," * 400_000 + b"[]]}", b"[" * (1 << 20)])
def test_the_collector_rests_while_a_large_body_is_read_and_not_after(body: bytes) -> None:
    begun: list[str] = []

    def seen(phase: str, info: dict[str, int]) -> None:
        begun.append(phase)

    gc.collect()
    gc.callbacks.append(seen)
    try:
        parse_json_object(body)
    except InvalidRequest:
        assert body.startswith(b"[[")
    finally:
        gc.callbacks.remove(seen)
    assert gc.isenabled() and len(begun) <= 4  # what making the error, or the answer, set off
