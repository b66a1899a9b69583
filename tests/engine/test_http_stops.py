"""Stop strings and end tokens within calls and JSON decide the finish reason."""

import json
from typing import Any

import pytest

from tests.engine.test_http_responses import FLAT
from tests.engine.test_http_tools import CALL, NAMED, TOOL
from tests.rigs.http_server import Server, chunks, serving_4k, text_script

REQUIRED = '[{"name": "add", "parameters": {"a": 12}}]'
TWO = (
    '[{"name": "add", "parameters": {"a": 12}}, '
    '{"name": "add", "parameters": {"a": 345}}]'
)
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
ONE: dict[str, Any] = {"tools": [TOOL], "tool_choice": NAMED}
AUTO: dict[str, Any] = {"tools": [TOOL]}


async def both(
    server: Server, **request: Any
) -> tuple[str, Any, str | None, list[str]]:
    """Return finish reason, stop reason, content and arguments; check a stream, too."""
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
            at = call["index"]
            streamed[at] = streamed.get(at, "") + call["function"]["arguments"]
    last = events[-1]["choices"][0]
    assert last["finish_reason"] == choice["finish_reason"]
    assert last.get("stop_reason") == choice.get("stop_reason")
    assert [streamed[at] for at in sorted(streamed)] == arguments and text == (
        content or ""
    )
    return choice["finish_reason"], choice.get("stop_reason"), content, arguments


@pytest.mark.parametrize(
    ("says", "request_fields", "stop", "finish_reason", "arguments"),
    [
        (REQUIRED, FORCED, "2}", "stop", ['{"a": 1']),
        ('{"a": 12}', ONE, "2}", "stop", ['{"a": 1']),
        ('{"a": 12}', ONE, "}", "stop", ['{"a": 12']),
        (CALL, AUTO, "1}", "stop", ['{"a": ']),
        (TWO, FORCED, "345", "stop", ['{"a": 12}', '{"a": ']),
        # Text that is cut off before the arguments is content.
        (REQUIRED, FORCED, "]", "tool_calls", ['{"a": 12}']),
        (CALL + " so.", AUTO, "so", "tool_calls", ['{"a": 1}']),
        (CALL, AUTO, "</tool_call>", "tool_calls", ['{"a": 1}']),
        (REQUIRED, FORCED, "none such", "tool_calls", ['{"a": 12}']),
        ('{"a": 12}', ONE, "none such", "tool_calls", ['{"a": 12}']),
    ],
)
async def test_calls_cut_by_a_stop_string_end_with_stop(
    tokenizer, says, request_fields, stop, finish_reason, arguments
):
    async with serving_4k(
        tokenizer, text_script(tokenizer, says, finish_reason="stop")
    ) as server:
        actual = await both(server, stop=stop, **request_fields)
    stop_reason = None if stop == "none such" else stop
    assert (actual[0], actual[1], actual[3]) == (finish_reason, stop_reason, arguments)


async def test_second_call_of_a_client_without_parallel_calls_does_not_end_the_answer(
    tokenizer,
):
    request = {**AUTO, "parallel_tool_calls": False, "stop": "99"}
    says = CALL + CALL.replace("1", "99")
    async with serving_4k(
        tokenizer, text_script(tokenizer, says, finish_reason="stop")
    ) as server:
        assert await both(server, **request) == ("tool_calls", "99", None, ['{"a": 1}'])


@pytest.mark.parametrize("at", ["limit", "end token", "stop token"])
async def test_calls_cut_for_another_reason_end_with_that_reason(tokenizer, at):
    reason = "length" if at == "limit" else "stop"
    script = text_script(tokenizer, CALL[:-15], finish_reason=reason)
    request = dict(AUTO)
    if at == "stop token":
        request["stop_token_ids"] = tokenizer.encode(CALL[-16])
    async with serving_4k(tokenizer, script) as server:
        actual = await both(server, **request)
        assert actual[0] == reason and actual[3][0].startswith('{"a":')
        body = {"model": "m", "input": "Hi", "tools": [FLAT]}
        answer = (await server.http.post("/v1/responses", json=body)).json()
        (item,) = answer["output"]
        assert (item["type"], item["status"]) == ("function_call", "incomplete")


async def test_json_cut_by_a_stop_string_ends_with_stop(tokenizer):
    """As in OpenAI's API, stop strings apply to JSON as to any other text."""
    says = json.dumps({"a": "one two"})
    form = {"type": "json_object"}
    async with serving_4k(
        tokenizer, text_script(tokenizer, says, finish_reason="stop")
    ) as server:
        actual = await both(server, response_format=form, stop=["two"])
        assert actual == ("stop", "two", '{"a": "one ', [])
        actual = await both(server, response_format=form, stop=["three"])
        assert actual == ("stop", None, says, [])
