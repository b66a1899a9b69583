"""Both servers of a request truncate a long prompt to the same length."""

import json
from typing import Any

import pytest

from proxy.body import parse_body, profile, with_prompt_limit
from tests.proxy.fakes import Fake, Rig, decodes, prefills

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
LIMIT_FIELD = "truncate_prompt_tokens"
AUTO = {"input": "a", "truncation": "auto"}


def limited(path: str, body: dict[str, Any], context: int | None = 1000) -> Any:
    """Return the prompt limit in the bodies that servers get. No other member
    changes.
    """
    parsed = parse_body(json.dumps(body).encode())
    leg = with_prompt_limit(parsed, path, lambda: context)
    members = {name: json.loads(bytes(value)) for name, value in leg.items()}
    assert {**members, LIMIT_FIELD: None} == {**body, LIMIT_FIELD: None}
    return members.get(LIMIT_FIELD)


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (COMPLETIONS, {LIMIT_FIELD: -1, "max_tokens": 100}, 900),
        (
            COMPLETIONS,
            {LIMIT_FIELD: -1, "max_tokens": 100, "max_completion_tokens": 99},
            901,
        ),
        (COMPLETIONS, {LIMIT_FIELD: -1, "max_tokens": 0}, 1000),
        (COMPLETIONS, {LIMIT_FIELD: -1}, 750),
        (COMPLETIONS, {LIMIT_FIELD: -1, "max_tokens": None}, 750),
        # Servers refuse 1000 output tokens.
        (COMPLETIONS, {LIMIT_FIELD: -1, "max_tokens": 1000}, 1),
        (COMPLETIONS, {LIMIT_FIELD: 7, "max_tokens": 100}, 7),
        (COMPLETIONS, {"max_tokens": 100}, None),
        (COMPLETIONS, {"truncation": "auto"}, None),  # this endpoint has no such member
        (RESPONSES, {**AUTO, "max_output_tokens": 100}, 900),
        (RESPONSES, {**AUTO, "max_tokens": 100}, 750),
        (RESPONSES, {**AUTO, LIMIT_FIELD: 7}, 7),
        (RESPONSES, {**AUTO, LIMIT_FIELD: -1}, 750),
        (RESPONSES, {**AUTO, "truncation": "disabled"}, None),
        # Invalid values are not replaced, so that a server refuses them.
        (COMPLETIONS, {LIMIT_FIELD: "x"}, "x"),
        (COMPLETIONS, {LIMIT_FIELD: -1, "max_tokens": "x"}, -1),
        (COMPLETIONS, {LIMIT_FIELD: -1, "max_tokens": -5}, -1),
    ],
)
def test_prompt_limit_follows_from_the_context_and_the_output_limit(path, body, limit):
    assert limited(path, body) == limit


def test_servers_truncate_by_themselves_if_the_proxy_knows_no_context():
    assert limited(COMPLETIONS, {LIMIT_FIELD: -1}, None) == -1
    assert limited(RESPONSES, AUTO, None) is None


@pytest.mark.parametrize(
    ("path", "body", "contexts", "limit"),
    [
        (COMPLETIONS, {"prompt": "a", LIMIT_FIELD: -1, "max_tokens": 100}, [1000], 900),
        (
            COMPLETIONS,
            {"prompt": "a", LIMIT_FIELD: -1, "max_tokens": 100},
            [1000, 600],
            500,
        ),
        (COMPLETIONS, {"prompt": "a", LIMIT_FIELD: 50, "max_tokens": 100}, [1000], 50),
        (RESPONSES, {**AUTO, "max_output_tokens": 100}, [1000], 900),
    ],
)
async def test_both_legs_have_the_same_limit(path, body, contexts, limit):
    """The limit follows from the shortest context, because any of the servers may
    decode.
    """
    decode = [Fake(decodes, max_model_len=context) for context in contexts]
    async with Rig([Fake(prefills, max_model_len=800)], decode) as rig:
        response = await rig.client.post(path, json={"model": "m", **body})
        assert response.status_code == 200
        (prefill,) = rig.prefill[0].calls
        (call,) = [call for fake in rig.decode for call in fake.calls]
        assert prefill.body[LIMIT_FIELD] == call.body[LIMIT_FIELD] == limit
        if path == RESPONSES:
            assert prefill.body["truncation"] == call.body["truncation"] == "auto"


def profile_of(**body: Any) -> Any:
    return profile(parse_body(json.dumps({"max_tokens": 5, **body}).encode()))


def test_profile_of_a_truncated_prompt_is_bounded_by_the_limit():
    text = "x" * 40_000
    assert profile_of(prompt=text).tokens > 9000
    assert profile_of(prompt=text, **{LIMIT_FIELD: 100}).tokens == 100
    assert profile_of(prompt=[text, text], **{LIMIT_FIELD: 100}).tokens == 200
    assert profile_of(prompt=[1] * 5000, **{LIMIT_FIELD: 100}).tokens == 100
    assert profile_of(prompt="x" * 40, **{LIMIT_FIELD: 100}).tokens < 100
    assert profile_of(prompt=text, **{LIMIT_FIELD: 100}).max_output_tokens == 5


def test_truncated_prompt_shares_no_blocks_with_its_text():
    """A truncated prompt lacks its beginning, so its blocks differ from those of the
    full text.
    """
    text = "x" * 40_000
    assert profile_of(prompt=text).hashes
    assert not profile_of(prompt=text, **{LIMIT_FIELD: 100}).hashes
    assert (
        profile_of(prompt=text, **{LIMIT_FIELD: 20_000}).hashes
        == profile_of(prompt=text).hashes
    )
