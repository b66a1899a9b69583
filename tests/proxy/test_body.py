"""From a client's body to those of the two legs."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from protocol.errors import PayloadTooLarge, RequestError
from protocol.http.json_bounds import MAX_NODES, MAX_TOP_MEMBERS
from protocol.kv_params import REMOTE_DECODE
from proxy.body import decode_leg, params_of, parse_body, prefill_leg, sanitize
from tests.proxy.fakes import Rig
from tests.rigs.examples import examples

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=10,
)


def prefill(**body: Any) -> Any:
    return json.loads(prefill_leg(parse_body(json.dumps(body).encode())))


NOT_OBJECTS = [
    b"", b"{", b"[]", b"null", b'"text"', b'{"a": 1} x', b'{"a": NaN}', b"{'a': 1}", b'{"a": 01}',
    b'{"a": tru}', b'{"a": "\xff"}', b'{"\xff": 1}', b'{"a":' + b"[" * 1_000_000,
    b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"\xef\xbb\xbf{}", "{}".encode("utf-16"),
]  # fmt: skip


@pytest.mark.parametrize("data", NOT_OBJECTS, ids=lambda data: repr(data[:12]))
def test_what_is_not_a_json_object_is_refused(data):
    with pytest.raises(RequestError, match="the body"):
        parse_body(data)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"{}," * MAX_NODES + b"0]}",
        b"{" + b",".join(b'"%d":0' % at for at in range(MAX_TOP_MEMBERS + 1)) + b"}",
    ],
)
def test_too_many_members_are_refused_before_they_are_decoded(body):
    with pytest.raises(PayloadTooLarge, match="the limit is"):
        parse_body(body)


@examples(40)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_decode_server_gets_what_the_client_sent(body):
    body.pop("kv_transfer_params", None)
    body["seed"] = 5
    clean, stripped = sanitize(parse_body(json.dumps(body).encode()))
    assert not stripped
    assert json.loads(decode_leg(clean, None)) == body
    params = params_of(b'{"kv_transfer_params": {"a": 1.10}}')
    lent = {"sender_releases": True, "a": 1.1}
    assert json.loads(decode_leg(clean, params)) == {**body, "kv_transfer_params": lent}


@pytest.mark.parametrize(
    ("params", "lent"),
    [
        (b' { "a" : 1.10 } ', b'{"sender_releases":true,"a":1.10}'),
        (b'[ {"a":1e400} , {"b":[{}]} ]',
         b'[{"sender_releases":true,"a":1e400},{"sender_releases":true,"b":[{}]}]'),
        (b"{}", b"{}"),
        (b"[{ }, 7]", b"[{ }, 7]"),
    ],
)  # fmt: skip
def test_a_decode_server_hears_that_the_lease_is_the_proxys_to_end(params, lent):
    found = params_of(b'{"kv_transfer_params":' + params + b"}")
    assert found is not None
    assert decode_leg({}, found) == b'{"kv_transfer_params":' + lent + b"}"


def test_numbers_are_not_rewritten():
    data = b'{"a":1.10,"b":123456789012345678901234567890,"c":1E400,"seed":0}'
    assert decode_leg(sanitize(parse_body(data))[0], None) == data


@pytest.mark.parametrize(
    ("name", "params", "counted"),
    [
        ("kv_transfer_params", "null", False),
        ("kv_transfer_params", "{}", True),
        ("kv_transfer_para\\u006ds", '[{"remote_host": "x"}]', True),
    ],
)
def test_params_of_clients_are_dropped_and_counted(name, params, counted):
    clean, stripped = sanitize(
        parse_body(f'{{"seed": 1, "{name}": {params}}}'.encode())
    )
    assert json.loads(decode_leg(clean, None)) == {"seed": 1}
    assert stripped is counted


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("given", [{}, {"cache_salt": None}, {"cache_salt": "s"}])
async def test_servers_get_a_salt_that_is_derived_from_the_key(given, has_keys):
    """Both legs get the same one, and no client can have the salt of another key. The keys may be
    the proxy's, or those of its servers, which it passes on."""
    keys = [f"sk-{name}-0123456789" for name in ("alice", "bob")]
    options: dict[str, Any] = {"cache_salt_by_key": True}
    if has_keys:
        options["api_key"] = tuple(map(SecretStr, keys))
    salts = []
    async with Rig(
        **options, cluster_secret=SecretStr("a secret of the cluster, 32 bytes")
    ) as rig:
        for key in (*keys, keys[0]):
            headers = {"authorization": f"Bearer {key}"}
            if len(salts) == 1:  # who may know it, as servers may log it
                given = {"cache_salt": salts[0]}
            assert (await rig.complete(headers, **given)).status_code == 200
            told = [
                fake.calls[-1].body["cache_salt"]
                for fake in (*rig.prefill, *rig.decode)
            ]
            assert told[0] == told[1] and not any(
                part in told[0] for part in (key, key[3:8])
            )
            salts.append(told[0])
    assert len(set(salts)) == 3


def test_of_a_repeated_key_both_servers_see_the_same():
    clean, _ = sanitize(parse_body(b'{"seed": 1, "prompt": "a", "prompt": "b"}'))
    assert json.loads(decode_leg(clean, None))["prompt"] == "b"
    assert json.loads(prefill_leg(clean))["prompt"] == "b"


@pytest.mark.parametrize(
    ("asked", "leg"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": 1}),
        ({"max_tokens": 50}, {"max_tokens": 1}),
        ({"max_completion_tokens": 50}, {"max_completion_tokens": 1}),
        (
            {"max_completion_tokens": None},
            {"max_completion_tokens": None, "max_tokens": 1},
        ),
        (
            {"max_tokens": 5, "max_completion_tokens": 6},
            {"max_tokens": 1, "max_completion_tokens": 1},
        ),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            {"max_tokens": 1},
        ),
        ({"stream": None}, {"max_tokens": 1}),
        # Wrong ones stay, for the prefill server to refuse.
        ({"max_tokens": 0}, {"max_tokens": 0}),
        ({"max_tokens": -1}, {"max_tokens": -1}),
        ({"max_tokens": "9"}, {"max_tokens": "9"}),
        ({"max_tokens": 2**31}, {"max_tokens": 2**31}),
        ({"max_completion_tokens": True}, {"max_completion_tokens": True}),
        ({"stream": "yes"}, {"max_tokens": 1, "stream": "yes"}),
    ],
)
def test_the_prefill_server_is_asked_for_one_whole_token(asked, leg):
    kept = {"prompt": "x", "min_tokens": 7}  # which shapes the first token
    told = {"stream": False, "kv_transfer_params": REMOTE_DECODE}
    assert prefill(**kept, **asked) == {**kept, **told, **leg}


@pytest.mark.parametrize(
    ("answer", "params"),
    [
        (b'{"kv_transfer_params": {"a": 1}}', b'{"a": 1}'),
        (b'{"x": [1], "kv_transfer_params": [ {"a": 1} ]}', b'[ {"a": 1} ]'),
        (b'{"kv_transfer_params": null}', None),
        (b'{"kv_transfer_params": []}', None),
        (b'{"kv_transfer_params": 3}', None),
        (b"{}", None),
        (b"[]", None),
        (b"not json", None),
    ],
)
def test_params_are_taken_from_the_answer_as_they_are(answer, params):
    found = params_of(answer)
    assert (None if found is None else bytes(found)) == params


def test_a_response_is_prefilled_with_its_own_limit():
    for body in (
        {"input": "a"},
        {"input": "a", "max_output_tokens": 9, "stream": True},
    ):
        leg = json.loads(
            prefill_leg(parse_body(json.dumps(body).encode()), "/v1/responses")
        )
        assert leg["max_output_tokens"] == 1 and "max_tokens" not in leg
        assert leg.get("stream", False) is False
