"""The request bodies of both legs, which the proxy makes from the client's body."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from protocol.errors import PayloadTooLarge, RequestError
from protocol.http.json_bounds import MAX_NODES, MAX_TOP_MEMBERS
from protocol.kv_params import REMOTE_DECODE
from proxy.body import decode_leg, params_of, parse_body, prefill_leg, profile, sanitize
from tests.proxy.fakes import Rig
from tests.rigs.agents import agent_request
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
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"a": 1} x',
    b'{"a": NaN}',
    b"{'a': 1}",
    b'{"a": 01}',
    b'{"a": tru}',
    b'{"a": "\xff"}',
    b'{"\xff": 1}',
    b'{"a":' + b"[" * 1_000_000,
    b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
]


@pytest.mark.parametrize("data", NOT_OBJECTS, ids=lambda data: repr(data[:12]))
def test_body_that_is_not_a_json_object_is_refused(data):
    with pytest.raises(RequestError, match="the body"):
        parse_body(data)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"{}," * MAX_NODES + b"0]}",
        b"{"
        + b",".join(b'"%d":0' % index for index in range(MAX_TOP_MEMBERS + 1))
        + b"}",
    ],
)
def test_too_many_members_are_refused_before_they_are_decoded(body):
    with pytest.raises(PayloadTooLarge, match="the limit is"):
        parse_body(body)


@examples(40)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_decode_server_gets_what_the_client_sent(body):
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
        (
            b'[ {"a":1e400} , {"b":[{}]} ]',
            b'[{"sender_releases":true,"a":1e400},{"sender_releases":true,"b":[{}]}]',
        ),
        (b"{}", b"{}"),
        (b"[{ }, 7]", b"[{ }, 7]"),
    ],
)
def test_decode_leg_is_marked_as_released_by_the_proxy(params, lent):
    parsed = params_of(b'{"kv_transfer_params":' + params + b"}")
    assert parsed is not None
    assert decode_leg({}, parsed) == b'{"kv_transfer_params":' + lent + b"}"


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
def test_kv_transfer_params_of_clients_are_dropped_and_counted(name, params, counted):
    clean, stripped = sanitize(
        parse_body(f'{{"seed": 1, "{name}": {params}}}'.encode())
    )
    assert json.loads(decode_leg(clean, None)) == {"seed": 1}
    assert stripped is counted


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("cache_salt", [{}, {"cache_salt": None}, {"cache_salt": "s"}])
async def test_servers_get_a_salt_that_is_derived_from_the_key(cache_salt, has_keys):
    """Both legs get the same cache salt. No client can use the salt of another client's
    key.

    Either the proxy checks the keys, or it forwards the keys and its servers check
    them.
    """
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
            if len(salts) == 1:
                # The second client may know the first client's salt, because servers
                # may log it.
                cache_salt = {"cache_salt": salts[0]}
            assert (await rig.complete(headers, **cache_salt)).status_code == 200
            prefill_salt, decode_salt = (
                fake.calls[-1].body["cache_salt"]
                for fake in (*rig.prefill, *rig.decode)
            )
            assert prefill_salt == decode_salt
            assert key not in prefill_salt and key[3:8] not in prefill_salt
            salts.append(prefill_salt)
    assert len(set(salts)) == 3


def test_both_legs_have_the_same_value_of_a_repeated_member():
    clean, _ = sanitize(parse_body(b'{"seed": 1, "prompt": "a", "prompt": "b"}'))
    assert json.loads(decode_leg(clean, None))["prompt"] == "b"
    assert json.loads(prefill_leg(clean))["prompt"] == "b"


@pytest.mark.parametrize(
    ("members", "leg"),
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
        # Invalid values are not replaced, so that the prefill server refuses them.
        ({"max_tokens": 0}, {"max_tokens": 0}),
        ({"max_tokens": -1}, {"max_tokens": -1}),
        ({"max_tokens": "9"}, {"max_tokens": "9"}),
        ({"max_tokens": 2**31}, {"max_tokens": 2**31}),
        ({"max_completion_tokens": True}, {"max_completion_tokens": True}),
        ({"stream": "yes"}, {"max_tokens": 1, "stream": "yes"}),
    ],
)
def test_prefill_leg_requests_one_token_without_a_stream(members, leg):
    unchanged = {"prompt": "x", "min_tokens": 7}  # min_tokens affects the first token
    added = {"stream": False, "kv_transfer_params": REMOTE_DECODE}
    assert prefill(**unchanged, **members) == {**unchanged, **added, **leg}


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
def test_params_are_taken_unchanged_from_the_answer(answer, params):
    parsed = params_of(answer)
    assert (None if parsed is None else bytes(parsed)) == params


def test_prefill_leg_of_v1_responses_has_max_output_tokens():
    for body in (
        {"input": "a"},
        {"input": "a", "max_output_tokens": 9, "stream": True},
    ):
        leg = json.loads(
            prefill_leg(parse_body(json.dumps(body).encode()), "/v1/responses")
        )
        assert leg["max_output_tokens"] == 1 and "max_tokens" not in leg
        assert leg.get("stream", False) is False


def test_turns_of_claude_code_share_the_hashes_of_their_common_prefix():
    """The hashes depend neither on the line for Anthropic's billing nor on the place of
    `cache_control`, because these are not part of the prompt.
    """
    hashes = []
    for name in ("first_turn", "second_turn"):
        body = parse_body(json.dumps(agent_request(name)).encode())
        hashes.append(list(profile(body).hashes))
    first, second = hashes
    assert len(first) > 10
    assert second[: len(first)] == first


def test_text_about_cache_control_stays_in_the_profile():
    lengths = []
    for text in ("", ', "cache_control": {"type": "ephemeral"}'):
        messages = [{"role": "user", "content": f"Explain{text}."}]
        body = parse_body(json.dumps({"messages": messages}).encode())
        lengths.append(len(profile(body).text))
    assert lengths[1] > lengths[0] + 40
