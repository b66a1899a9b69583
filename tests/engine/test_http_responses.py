"""Tools and reasoning at /v1/responses, read and sent back by OpenAI's own client."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent

from tests.engine.test_http_errors import failing_after
from tests.engine.test_http_tools import CALL, TOOL
from tests.rigs.http_server import (
    Server,
    events,
    serving_4k,
    text_script,
    with_template,
)

# This template writes each field of the messages that it receives.
TEMPLATE = "{# <think></think> #}{% for m in messages %}{{ m.role }}:{{ m.content }}\
|{{ m.reasoning_content }}|{{ m.tool_call_id }}|\
{{ m.tool_calls | tojson if m.tool_calls }};\
{% endfor %}\
{{ tools | length if tools }},{{ reasoning_effort }}"
FLAT = {"type": "function", "strict": True, "defer_loading": False, **TOOL["function"]}
# Texts of the model, and the types of the items in the response.
OUTPUTS = [
    ("<think>I add.</think>\nSo: ", ("reasoning", "message")),
    ("Hello", ("message",)),
    ("", ("message",)),
    (
        "<think>hm</think>" + CALL + CALL,
        ("reasoning", "function_call", "function_call"),
    ),
    (CALL, ("function_call",)),
    (f"So:{CALL}Hm.", ("message", "function_call", "message")),
    ("<think>for ever", ("reasoning",)),
]


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.http.base_url}/v1", api_key="-", max_retries=0
    )


def _text_of(item: Any) -> str:
    if item.type == "function_call":
        return f"{item.name}({item.arguments})"
    return "".join(part.text for part in item.content or [])


@pytest.mark.parametrize(("text", "kinds"), OUTPUTS)
async def test_client_reads_the_same_items_with_and_without_a_stream(
    tokenizer, text, kinds
):
    templated = with_template(tokenizer, TEMPLATE)
    request: Any = {
        "model": "m",
        "input": "1 + 1?",
        "tools": [FLAT],
        "reasoning": {"effort": "low"},
    }
    async with serving_4k(
        templated, text_script(templated, text, finish_reason="stop")
    ) as server:
        async with client_of(server) as client:
            complete_response = await client.responses.create(**request)
            async with client.responses.stream(**request) as stream:
                stream_events = [event async for event in stream]
                final = await stream.get_final_response()
        actual = templated.decode(server.engine.added[0].token_ids)
    assert actual.endswith("1,low") and complete_response.reasoning.effort == "low"
    assert tuple(item.type for item in complete_response.output) == kinds
    shown = [_text_of(item) for item in complete_response.output]
    assert shown == [_text_of(item) for item in final.output]
    output = (
        text.replace(CALL, 'add({"a": 1})')
        .replace("<think>", "")
        .replace("</think>\n", "")
    )
    assert "".join(shown) == output.replace("</think>", "")
    assert len({item.id for item in final.output}) == len(kinds)
    assert [event.type for event in stream_events].count(
        "response.output_item.done"
    ) == len(kinds)
    assert [event.sequence_number for event in stream_events] == list(
        range(len(stream_events))
    )
    assert (
        stream_events[0].type == "response.created"
        and stream_events[-1].type == "response.completed"
    )
    details = complete_response.usage.output_tokens_details
    assert (details.reasoning_tokens > 0) == ("reasoning" in kinds)


async def test_failed_stream_ends_with_the_error_that_each_client_expects(tokenizer):
    """OpenAI's client raises an exception for an error event. Other clients expect a
    failed response."""
    script = failing_after(2)
    request: Any = {"model": "m", "input": "1 + 1?", "stream": True}
    async with serving_4k(tokenizer, script) as server, client_of(server) as client:
        with pytest.raises(openai.APIError, match="it broke"):
            _ = [event async for event in await client.responses.create(**request)]
        *stream_events, error, failed = events(
            await server.http.post("/v1/responses", json=request)
        )
    assert [name for name, _ in (error, failed)] == ["error", "response.failed"]
    numbers = [event["sequence_number"] for _, event in (*stream_events, error, failed)]
    assert numbers == list(range(len(numbers)))
    raised = ResponseErrorEvent.model_validate(error[1], strict=True)
    assert (raised.code, raised.message) == (
        "transfer_failed",
        error[1]["error"]["message"],
    )
    failed_response = ResponseFailedEvent.model_validate(failed[1]).response
    assert (failed_response.id, failed_response.status) == (
        stream_events[0][1]["response"]["id"],
        "failed",
    )
    assert (
        failed_response.error is not None
        and failed_response.error.message == raised.message
    )


@pytest.mark.parametrize(
    ("text", "output"),
    [(f"So: {CALL}", "So:"), (f"{CALL}Hm.", "Hm."), (f"So: {CALL}Hm.", "So:\n\nHm.")],
)
async def test_conversation_with_calls_can_be_sent_back_unchanged(
    tokenizer, text, output
):
    """In the prompt, text that followed a call must precede the call, because chat
    templates refuse a turn between a call and its output.
    """
    templated = with_template(tokenizer, TEMPLATE)
    text = f"<think>I add.</think>{text}"
    async with serving_4k(
        templated, text_script(templated, text, finish_reason="stop")
    ) as server:
        async with client_of(server) as client:
            request: list[Any] = [{"role": "user", "content": "1 + 1?"}]
            first = await client.responses.create(
                model="m", input=request, tools=[FLAT]
            )  # type: ignore[list-item]
            (call,) = (item for item in first.output if item.type == "function_call")
            result = {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": "2",
            }
            items = [item.model_dump(exclude_none=True) for item in first.output]
            second_request: list[Any] = [*request, *items, result]
            await client.responses.create(model="m", input=second_request)
        actual = templated.decode(server.engine.added[-1].token_ids)
    function = {"name": "add", "arguments": {"a": 1}}
    call_in_prompt = {"id": call.call_id, "type": "function", "function": function}
    turn = f"assistant:{output}|I add.||{json.dumps([call_in_prompt])};"
    assert actual == f"user:1 + 1?|||;{turn}tool:2||{call.call_id}|;,"


@pytest.mark.parametrize(
    ("request_fields", "grammar"),
    [
        ({"tool_choice": {"type": "function", "name": "add"}}, "json_schema"),
        ({"tool_choice": "required"}, "calls"),
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "none"}, None),
    ],
)
async def test_tool_call_can_be_required(tokenizer, request_fields, grammar):
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        body = {"model": "m", "input": "Hi", "tools": [FLAT], **request_fields}
        assert (await server.http.post("/v1/responses", json=body)).status_code == 200
        (add,) = server.engine.added
        actual = add.sampling.grammar
        assert (actual and actual.kind) == grammar
