import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import KVParamsRejected
from protocol.kv_params import (
    is_absent,
    is_prefill_request,
    parse,
    parse_list,
    prompt_digest,
    to_remote_prefill,
)
from protocol.messages import FirstToken, TokenLogprobs
from tests.rigs import offers

SECRET = b"cluster secret"


PROMPT = range(1, 11)


def offer(**changes: Any) -> dict[str, Any]:
    return offers.offer(SECRET, PROMPT, **changes)


def through_floats(value: Any) -> Any:
    """Returns a JSON value as sent by a relay that writes all numbers as floats."""
    if isinstance(value, dict):
        return {key: through_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [through_floats(item) for item in value]
    return (
        float(value)
        if isinstance(value, int) and not isinstance(value, bool)
        else value
    )


def test_signature_survives_relays_that_write_json_differently():
    text = json.dumps(offer(), indent=2, sort_keys=True)
    parse(json.loads(text)).verify(SECRET)
    parse({**offer(), "added_by_a_proxy": {"x": 1}, "do_remote_decode": None}).verify(
        SECRET
    )
    without = {k: v for k, v in offer().items() if k != "do_remote_decode"}
    parse(without).verify(SECRET)
    assert "." not in text.replace("127.0.0.1", ""), "a number has a fraction"


ROWS = [None, TokenLogprobs(-0.25, [3], [-0.125], 9), TokenLogprobs(-math.inf)]


@given(
    logprob=st.floats(-9999.0, 0.0, width=32),
    lease_s=st.floats(0.001, 86400),
    seed=st.integers(-(2**63), 2**63 - 1),
    request_id=st.text(min_size=1, max_size=50),
)
def test_property_any_values_survive_a_json_relay(logprob, lease_s, seed, request_id):
    tokens = [
        FirstToken(5, TokenLogprobs(logprob, [5, 7], [logprob, -3.25])),
        FirstToken(2),
    ]
    members = {"lease_s": lease_s, "seed": seed, "remote_request_id": request_id}
    reference = offer(first_tokens=tokens, prompt_logprobs=ROWS, **members)
    params = parse(through_floats(json.loads(json.dumps(reference))))
    params.verify(SECRET)
    assert params.seed == str(seed)
    remote = to_remote_prefill(params)
    assert (remote.host, remote.port, remote.block_ids) == (
        "127.0.0.1",
        5600,
        [3, 4, 5],
    )
    assert remote.first_tokens == tokens
    # JSON has no -inf, so -9999.0 replaces it.
    assert remote.prompt_logprobs == [*ROWS[:2], TokenLogprobs(-9999.0)]
    assert remote.lease_s == pytest.approx(lease_s, abs=1e-3)


# For each field, a valid value that differs from the offer's.
ALTERED = {
    "remote_engine_id": "prefill-2",
    "remote_request_id": "other",
    "remote_block_ids": [3, 5, 4],
    "remote_host": "169.254.169.254",
    "remote_port": 80,
    "tp_size": 2,
    "lease_id": "f" * 32,
    "lease_ms": 31_000,
    "incarnation": "beef",
    "remote_num_tokens": 41,
    "remote_block_size": 15,
    "remote_cached_tokens": 4,
    "prompt_digest": "0" * 64,
    "sampling_digest": "0" * 64,
    "seed": "1",
    "signature": "0" * 64,
}
ALTERED_LISTS = [
    ("first_tokens", [{"id": 43, "logprobs": None}]),
    ("first_tokens", [{"id": 42, "logprobs": [3187671040, [42, 8], [3187671040], 0]}]),
    ("prompt_logprobs", None),
    ("prompt_logprobs", [None, [1, [3], [2]], [3, [], []]]),
]


@pytest.mark.parametrize(("field", "value"), [*ALTERED.items(), *ALTERED_LISTS])
def test_every_altered_field_breaks_the_signature(field, value):
    first = FirstToken(42, TokenLogprobs(-0.125, [42, 7], [-0.125]))
    params = parse({**offer(first_tokens=[first], prompt_logprobs=ROWS), field: value})
    with pytest.raises(KVParamsRejected, match="signature does not match") as caught:
        params.verify(SECRET)
    if field != "signature":
        assert f"match: {field} changed between" in caught.value.message
        assert "SECRET" not in caught.value.message


@pytest.mark.parametrize(
    "field", ["remote_engine_id", "remote_request_id", "remote_host", "incarnation"]
)
def test_text_with_an_unpaired_surrogate_has_no_valid_signature(field):
    reference = json.loads(json.dumps({**offer(), field: "\ud800"}))
    with pytest.raises(KVParamsRejected, match="signature"):
        parse(reference).verify(SECRET)


def test_error_reports_a_wrong_secret_or_missing_checksums():
    with pytest.raises(KVParamsRejected, match=r"signature .* checksums changed"):
        parse({**offer(), "tp_size": 2, "checksums": None}).verify(SECRET)
    with pytest.raises(KVParamsRejected, match=r"signature .* BATON_CLUSTER_SECRET"):
        parse(offer()).verify(b"another secret")


WRONG = [
    (field, value)
    for field in ALTERED
    for value in (
        None,
        True,
        {},
        [],
        "",
        -1,
        1e300,
        math.nan,
        math.inf,
        10**400,
        "x" * 2000,
        [{}],
    )
]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *WRONG,
        ("remote_port", 65536),
        ("remote_port", 0),
        ("remote_block_ids", [1, 2, -3]),
        ("remote_block_ids", [1, 2, 2.5]),
        ("remote_block_ids", [1, 2, True]),
        ("seed", "1" * 20),
        ("seed", "--1"),
        ("lease_ms", 0),
        ("lease_ms", "30"),
        ("lease_id", "F" * 32),
        ("first_tokens", [{"id": -1}]),
        ("first_tokens", [{"id": 1, "logprobs": {"logprob": 5}}]),
        ("first_tokens", [{"id": 1, "logprobs": [2**32, [], []]}]),
        ("first_tokens", [{"id": 1, "logprobs": [1, [1]]}]),
        ("do_remote_decode", True),
        ("do_remote_decode", 1),
        ("do_remote_prefill", False),
        ("do_remote_prefill", "true"),
        *(
            ("prompt_logprobs", rows)
            for rows in (
                [],
                [None, [-1, [], []], None],
                [None, [1, []], [1, [], []]],
                "no",
                [[]],
            )
        ),
    ],
    ids=lambda v: str(v)[:12],
)
def test_error_about_a_wrong_type_or_range_names_the_field(field, value):
    with pytest.raises(KVParamsRejected) as caught:
        parse({**offer(), field: value})
    assert str(caught.value.param).startswith(f"kv_transfer_params.{field}")
    assert field in caught.value.message
    assert len(caught.value.message) < 400


def test_large_object_is_not_converted_for_a_value_that_is_not_an_integer(monkeypatch):
    # The patched function raises if it is called with the complete object, which is a
    # dict.
    monkeypatch.setattr("protocol.kv_params._with_integers", lambda value: value * 1)
    with pytest.raises(KVParamsRejected, match="remote_port"):
        parse({**offer(), "remote_port": 1.5})


@pytest.mark.parametrize("value", [None, 3, "x", [], {}])
def test_object_that_is_not_a_reference_is_rejected(value):
    with pytest.raises(KVParamsRejected):
        parse(value)


def test_number_of_objects_must_equal_the_number_of_prompts():
    assert len(parse_list(offer(), 1)) == 1
    assert len(parse_list([offer(), offer()], 2)) == 2
    for references, num_prompts in [
        (offer(), 2),
        ([offer()], 2),
        ([], 1),
        ([offer(), offer()], 1),
    ]:
        with pytest.raises(KVParamsRejected, match="prompts"):
            parse_list(references, num_prompts)


def test_null_and_false_members_count_as_absent():
    flags = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
    }
    assert is_prefill_request({**flags, "remote_block_ids": None, "unknown": 1})
    for absent in (None, {}, {"do_remote_decode": False, "remote_host": None}):
        assert is_absent(absent) and not is_prefill_request(absent)
    assert not is_prefill_request(offer()) and not is_absent(offer())


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "remote_host": "h"},
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"do_remote_decode": "yes"},
        [1],
        "x",
    ],
)
def test_contradictory_prefill_flags_are_rejected(params):
    with pytest.raises(KVParamsRejected):
        is_prefill_request(params)


def test_prompt_digest_differs_for_different_prompts():
    prompts = [[], [0], [0, 0], [1, 2], [2, 1], [258], [1 << 40]]
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)
