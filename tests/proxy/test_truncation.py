"""Prompts that are cut to fit: both servers of a request cut them alike."""

import json
from typing import Any

import pytest

from proxy.body import parse_body, profile, with_prompt_limit
from tests.proxy.fakes import Fake, Rig, decodes, prefills

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
LIMIT = "truncate_prompt_tokens"
AUTO = {"input": "a", "truncation": "auto"}


def limited(path: str, body: dict[str, Any], context: int | None = 1000) -> Any:
    found = with_prompt_limit(
        parse_body(json.dumps(body).encode()), path, lambda: context
    )
    told = {name: json.loads(bytes(value)) for name, value in found.items()}
    assert {**told, LIMIT: None} == {**body, LIMIT: None}
    return told.get(LIMIT)


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (COMPLETIONS, {LIMIT: -1, "max_tokens": 100}, 900),
        (COMPLETIONS, {LIMIT: -1, "max_tokens": 100, "max_completion_tokens": 99}, 901),
        (COMPLETIONS, {LIMIT: -1, "max_tokens": 0}, 1000),
        (COMPLETIONS, {LIMIT: -1}, 750),
        (COMPLETIONS, {LIMIT: -1, "max_tokens": None}, 750),
        (COMPLETIONS, {LIMIT: -1, "max_tokens": 1000}, 1),  # which servers refuse
        (COMPLETIONS, {LIMIT: 7, "max_tokens": 100}, 7),
        (COMPLETIONS, {"max_tokens": 100}, None),
        (COMPLETIONS, {"truncation": "auto"}, None),  # no field of this endpoint
        (RESPONSES, {**AUTO, "max_output_tokens": 100}, 900),
        (RESPONSES, {**AUTO, "max_tokens": 100}, 750),
        (RESPONSES, {**AUTO, LIMIT: 7}, 7),
        (RESPONSES, {**AUTO, LIMIT: -1}, 750),
        (RESPONSES, {**AUTO, "truncation": "disabled"}, None),
        # Wrong ones stay, for a server to refuse.
        (COMPLETIONS, {LIMIT: "x"}, "x"),
        (COMPLETIONS, {LIMIT: -1, "max_tokens": "x"}, -1),
        (COMPLETIONS, {LIMIT: -1, "max_tokens": -5}, -1),
    ],
)
def test_the_limit_of_a_prompt_follows_from_context_and_answer(path, body, limit):
    assert limited(path, body) == limit


def test_servers_cut_by_their_own_contexts_where_the_proxy_knows_none():
    assert limited(COMPLETIONS, {LIMIT: -1}, None) == -1
    assert limited(RESPONSES, AUTO, None) is None


@pytest.mark.parametrize(
    ("path", "body", "contexts", "limit"),
    [
        (COMPLETIONS, {"prompt": "a", LIMIT: -1, "max_tokens": 100}, [1000], 900),
        (COMPLETIONS, {"prompt": "a", LIMIT: -1, "max_tokens": 100}, [1000, 600], 500),
        (COMPLETIONS, {"prompt": "a", LIMIT: 50, "max_tokens": 100}, [1000], 50),
        (RESPONSES, {**AUTO, "max_output_tokens": 100}, [1000], 900),
    ],
)
async def test_both_legs_have_the_same_limit(path, body, contexts, limit):
    """By the shortest context, as any of the servers may be the one that decodes."""
    decode = [Fake(decodes, max_model_len=context) for context in contexts]
    async with Rig([Fake(prefills, max_model_len=800)], decode) as rig:
        assert (
            await rig.client.post(path, json={"model": "m", **body})
        ).status_code == 200
        (prefill,) = rig.prefill[0].calls
        (call,) = [call for fake in rig.decode for call in fake.calls]
        assert prefill.body[LIMIT] == call.body[LIMIT] == limit
        if path == RESPONSES:
            assert prefill.body["truncation"] == call.body["truncation"] == "auto"


def asked(**body: Any) -> Any:
    return profile(parse_body(json.dumps({"max_tokens": 5, **body}).encode()))


def test_a_prompt_that_will_be_cut_is_not_thought_longer_than_that():
    text = "x" * 40_000
    assert asked(prompt=text).tokens > 9000
    assert asked(prompt=text, **{LIMIT: 100}).tokens == 100
    assert asked(prompt=[text, text], **{LIMIT: 100}).tokens == 200
    assert asked(prompt=[1] * 5000, **{LIMIT: 100}).tokens == 100
    assert asked(prompt="x" * 40, **{LIMIT: 100}).tokens < 100
    assert asked(prompt=text, **{LIMIT: 100}).max_output_tokens == 5


def test_the_beginning_of_a_text_that_will_be_cut_is_not_that_of_its_prompt():
    text = "x" * 40_000
    assert asked(prompt=text).hashes and not asked(prompt=text, **{LIMIT: 100}).hashes
    assert asked(prompt=text, **{LIMIT: 20_000}).hashes == asked(prompt=text).hashes
