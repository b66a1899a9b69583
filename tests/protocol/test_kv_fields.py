import math
from typing import Any

import msgspec
import pytest

from protocol import kv_fields
from protocol.errors import KVParamsRejected
from protocol.kv_fields import MAX_TOKENS, read_fields
from tests.protocol.test_kv_params import offer

ODD = (
    *(None, True, False, "", "x", "ü" * 128, "ü" * 129, "x" * 1025, [], {}, [1], [[1]], [None]),
    *(-1, 0, 1, 256, 257, 4096, 65535, 65536, MAX_TOKENS, MAX_TOKENS + 1, 2**32, 2**64, 10**400),
    *(0.0, 0.001, 1.0, 1.5, -0.0, 86400.0, 86400.5, 1e300, math.nan, math.inf, -math.inf),
    *("a" * 32, "a" * 64, "a" * 64 + "\n", "A" * 64, "g" * 64, "\n" + "a" * 63, "٣" * 64),
    *([1, 2], [1.0, 2], [True], [-1], [2**31], [2**32], [2**32 + 1], ["1"], (1, 2)),
)


@pytest.mark.parametrize("field", kv_fields._TYPED)
def test_what_a_type_takes_its_check_takes_with_the_same_result(field: str) -> None:
    typed, num_taken = kv_fields._TYPED[field], 0
    for value in ODD:
        try:
            taken = msgspec.convert(value, typed.kind)
        except msgspec.ValidationError:
            continue
        if isinstance(value, tuple):
            continue  # JSON has none
        checked = typed(value, field)
        assert (checked, type(checked)) == (taken, type(taken))
        num_taken += 1
    assert num_taken


def test_fields_are_the_same_whether_read_in_one_go_or_one_by_one() -> None:
    told: dict[str, Any] = offer(text_digest="a" * 64, prompt_token_ids=list(range(40)))
    floats = {**told, "remote_port": float(told["remote_port"])}
    assert read_fields(told) == read_fields(floats)
    assert type(read_fields(floats)["remote_port"]) is int
    bare = {k: v for k, v in told.items() if k not in ("text_digest", "prompt_token_ids")}
    assert read_fields(bare)["text_digest"] is None
    with pytest.raises(KVParamsRejected, match=r"signature must be 64 .* digits, got null"):
        read_fields({k: v for k, v in told.items() if k != "signature"})
