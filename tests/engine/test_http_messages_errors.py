"""Errors of /v1/messages: their form, and the exceptions of Anthropic's own client."""

from typing import Any

import pytest

from tests.engine.test_http_errors import failing_after
from tests.engine.test_http_messages import MESSAGES, REQUEST, TOOL
from tests.rigs.anthropic_client import client_of
from tests.rigs.http_server import (
    end,
    events,
    scripted,
    serving,
    serving_4k,
    text_script,
)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import the client; see client_of."""
    global anthropic
    import anthropic


async def test_errors_become_exceptions_of_the_client(tokenizer):
    async with serving(tokenizer, api_key=["secret-key"]) as server:
        with pytest.raises(anthropic.AuthenticationError) as unauthorized:
            async with client_of(server, api_key="x") as client:
                await client.messages.create(**REQUEST)
        assert unauthorized.value.type == "authentication_error"
        async with client_of(server, api_key="secret-key") as client:
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await client.messages.create(**{**REQUEST, "model": "gpt-17"})
            assert unknown.value.type == "not_found_error"
            assert unknown.value.request_id == unknown.value.body["request_id"]
            with pytest.raises(anthropic.BadRequestError, match="`foo`") as bad:
                await client.messages.create(**REQUEST, extra_body={"foo": 1})
            assert bad.value.type == "invalid_request_error"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                long: Any = [{"role": "user", "content": "1" * 100}]
                await client.messages.create(**{**REQUEST, "messages": long})
            with pytest.raises(anthropic.APIStatusError) as large:
                huge: Any = [{"role": "user", "content": "1" * 30_000}]
                await client.messages.create(**{**REQUEST, "messages": huge})
            assert large.value.type == "request_too_large"
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.batches.list()
        async with client_of(server, auth_token="secret-key", api_key=None) as client:
            assert (await client.messages.create(**{**REQUEST, "max_tokens": 2})).id


async def test_version_that_is_no_date_is_refused(tokenizer):
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        for version in ("2023-06-01", "2026-10-21", "latest"):
            response = await server.http.post(
                "/v1/messages", json=REQUEST, headers={"anthropic-version": version}
            )
            assert (response.status_code == 200) == (version != "latest")
        assert response.json()["type"] == "error"
        assert "latest" in response.json()["error"]["message"]
        other = await server.post(headers={"anthropic-version": "latest"})
        assert other.status_code == 200


# Requests with a mistake, and the field that the error names.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"max_token": 5}, "max_token"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"system": 3}, "system"),
    ({"system": [{"type": "text", "text": "a", "x": 1}]}, "system[0].x"),
    ({"cache_control": {"type": "x"}}, "cache_control.type"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"thinking": {"type": "x"}}, "thinking.type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"metadata": {"x": 1}}, "metadata.x"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
]
BLOCK = "messages[0].content[0]"
# Content blocks of a user message with a mistake, and the member that the error names.
BLOCK_MISTAKES: list[tuple[Any, str]] = [
    ({"type": "image", "source": {}}, f"{BLOCK}.type"),
    ({"type": "document", "source": {}}, f"{BLOCK}.type"),
    *(({"type": value, "text": "a"}, f"{BLOCK}.type") for value in ({}, [], 3, None)),
    ({"text": "a"}, f"{BLOCK}.type"),
    ({"type": "text"}, f"{BLOCK}.text"),
    ({"type": "text", "text": "a", "x": 1}, f"{BLOCK}.x"),
    ({"type": "text", "text": "a", "id": "b"}, f"{BLOCK}.id"),
    ({"type": "tool_use", "id": "a", "name": "b", "input": {}}, f"{BLOCK}.type"),
    (
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]},
        f"{BLOCK}.content[0].type",
    ),
    ("text", BLOCK),
]


async def test_mistake_is_refused_by_the_name_of_its_field(tokenizer):
    blocks = [
        ({"messages": [{"role": "user", "content": [block]}]}, path)
        for block, path in BLOCK_MISTAKES
    ]
    call = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
    ends_with_call = [*MESSAGES, {"role": "assistant", "content": [call]}]
    cases = [*MISTAKES, *blocks, ({"messages": ends_with_call}, "messages[1]")]
    control = {"type": "ephemeral"}
    text = {"type": "text", "text": "a", "cache_control": control}
    cases.append(({"system": [text] * 5}, "cache_control"))
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        for fields, path in cases:
            for name in ("", "/count_tokens"):
                body = {**REQUEST, **fields}
                if name:
                    del body["max_tokens"]
                response = await server.http.post(f"/v1/messages{name}", json=body)
                if name and path in ("max_tokens", "metadata.x"):
                    continue
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, path), fields
                assert f"`{path}`" in error["message"]


async def test_only_fields_that_need_no_answer_go_with_a_limit_of_zero_tokens(
    tokenizer,
):
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    call = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": TOOL["name"]}}
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"stream": True}, "stream"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.type"),
        ({"output_config": {"format": schema}}, "output_config.format"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice.type"),
        (call, "tool_choice.type"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, None),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, None),
    ]
    async with serving_4k(tokenizer, scripted(end())) as server:
        for fields, path in cases:
            body = {**REQUEST, "max_tokens": 0, **fields}
            response = await server.http.post("/v1/messages", json=body)
            answer = response.json()
            if path is None:
                assert (response.status_code, answer["content"]) == (200, []), fields
                continue
            assert (response.status_code, answer["error"]["param"]) == (400, path)
            assert "`max_tokens` 0" in answer["error"]["message"]
        assert {add.max_tokens for add in server.engine.added} == {0}


async def test_failed_stream_ends_with_an_error_event(tokenizer):
    async with (
        serving_4k(tokenizer, failing_after(2, "overloaded")) as server,
        client_of(server) as client,
    ):
        with pytest.raises(anthropic.APIStatusError, match="it broke") as failed:
            async with client.messages.stream(**REQUEST) as stream:
                await stream.get_final_message()
        assert failed.value.type == "overloaded_error"
        raw = await server.http.post("/v1/messages", json={**REQUEST, "stream": True})
        name, last = events(raw)[-1]
        assert name == last["type"] == "error" and last["request_id"]
