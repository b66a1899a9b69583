"""Stop strings and end tokens within calls and JSON decide the finish reason."""

import json
from typing import Any

import pytest

from tests.engine.test_http_responses import FLAT
from tests.engine.test_http_tools import CALL, NAMED, TOOL
from tests.rigs.http_server import Server, chunks, serving_4k, text_script

ONE_CALL = '[{"name": "add", "parameters": {"a": 12}}]'
TWO_CALLS = (
    '[{"name": "add", "parameters": {"a": 12}}, '
    '{"name": "add", "parameters": {"a": 345}}]'
)
REQUIRE_CALL: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
REQUIRE_ADD: dict[str, Any] = {"tools": [TOOL], "tool_choice": NAMED}
ALLOW_CALLS: dict[str, Any] = {"tools": [TOOL]}


async def complete_both_ways(
    server: Server, **request: Any
) -> tuple[str, Any, str | None, list[str]]:
    """Return finish reason, stop reason, content and arguments. Check that a stream
    gives the same results."""
    (choice,) = (await server.chat(max_tokens=200, **request)).json()["choices"]
    message = choice["message"]
    arguments = [
        call["function"]["arguments"] for call in message.get("tool_calls", [])
    ]
    content = message["content"]
    streamed: dict[int, str] = {}
    text = ""
    events = chunks(await server.chat(max_tokens=200, stream=True, **request))
    for delta in (event["choices"][0]["delta"] for event in events):
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            index = call["index"]
            streamed[index] = streamed.get(index, "") + call["function"]["arguments"]
    last = events[-1]["choices"][0]
    assert last["finish_reason"] == choice["finish_reason"]
    assert last.get("stop_reason") == choice.get("stop_reason")
    assert [streamed[index] for index in sorted(streamed)] == arguments
    assert text == (content or "")
    return choice["finish_reason"], choice.get("stop_reason"), content, arguments


@pytest.mark.parametrize(
    ("text", "request_fields", "stop", "finish_reason", "arguments"),
    [
        (ONE_CALL, REQUIRE_CALL, "2}", "stop", ['{"a": 1']),
        ('{"a": 12}', REQUIRE_ADD, "2}", "stop", ['{"a": 1']),
        ('{"a": 12}', REQUIRE_ADD, "}", "stop", ['{"a": 12']),
        (CALL, ALLOW_CALLS, "1}", "stop", ['{"a": ']),
        (TWO_CALLS, REQUIRE_CALL, "345", "stop", ['{"a": 12}', '{"a": ']),
        # A stop string after the arguments leaves the call complete.
        (ONE_CALL, REQUIRE_CALL, "]", "tool_calls", ['{"a": 12}']),
        (CALL + " so.", ALLOW_CALLS, "so", "tool_calls", ['{"a": 1}']),
        (CALL, ALLOW_CALLS, "</tool_call>", "tool_calls", ['{"a": 1}']),
        (ONE_CALL, REQUIRE_CALL, "none such", "tool_calls", ['{"a": 12}']),
        ('{"a": 12}', REQUIRE_ADD, "none such", "tool_calls", ['{"a": 12}']),
    ],
)
async def test_calls_cut_by_a_stop_string_end_with_stop(
    tokenizer, text, request_fields, stop, finish_reason, arguments
):
    async with serving_4k(
        tokenizer, text_script(tokenizer, text, finish_reason="stop")
    ) as server:
        actual = await complete_both_ways(server, stop=stop, **request_fields)
    stop_reason = None if stop == "none such" else stop
    assert (actual[0], actual[1], actual[3]) == (finish_reason, stop_reason, arguments)


async def test_second_call_of_a_client_without_parallel_calls_does_not_end_the_answer(
    tokenizer,
):
    request = {**ALLOW_CALLS, "parallel_tool_calls": False, "stop": "99"}
    text = CALL + CALL.replace("1", "99")
    async with serving_4k(
        tokenizer, text_script(tokenizer, text, finish_reason="stop")
    ) as server:
        assert await complete_both_ways(server, **request) == (
            "tool_calls",
            "99",
            None,
            ['{"a": 1}'],
        )


@pytest.mark.parametrize("cut", ["limit", "end token", "stop token"])
async def test_calls_cut_by_a_token_or_the_limit_end_with_that_reason(tokenizer, cut):
    reason = "length" if cut == "limit" else "stop"
    script = text_script(tokenizer, CALL[:-15], finish_reason=reason)
    request = dict(ALLOW_CALLS)
    if cut == "stop token":
        request["stop_token_ids"] = tokenizer.encode(CALL[-16])
    async with serving_4k(tokenizer, script) as server:
        actual = await complete_both_ways(server, **request)
        assert actual[0] == reason and actual[3][0].startswith('{"a":')
        body = {"model": "m", "input": "Hi", "tools": [FLAT]}
        answer = (await server.http.post("/v1/responses", json=body)).json()
        (item,) = answer["output"]
        assert (item["type"], item["status"]) == ("function_call", "incomplete")


async def test_json_cut_by_a_stop_string_ends_with_stop(tokenizer):
    """As in OpenAI's API, stop strings apply to JSON as to any other text."""
    text = json.dumps({"a": "one two"})
    response_format = {"type": "json_object"}
    async with serving_4k(
        tokenizer, text_script(tokenizer, text, finish_reason="stop")
    ) as server:
        actual = await complete_both_ways(
            server, response_format=response_format, stop=["two"]
        )
        assert actual == ("stop", "two", '{"a": "one ', [])
        actual = await complete_both_ways(
            server, response_format=response_format, stop=["three"]
        )
        assert actual == ("stop", None, text, [])
