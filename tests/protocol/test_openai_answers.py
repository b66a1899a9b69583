"""The events of streamed chats, and the events and the response of /v1/responses.

Responses of all endpoints over HTTP are tested in tests/engine/test_http_answers.py.
"""

import json
from typing import Any

from protocol.messages import KVUsage
from protocol.openai.chat import ChatRequest
from protocol.openai.requests import validate
from protocol.openai.responses import ChatWriter, ChoicePiece, Usage
from protocol.openai.responses_request import parse_responses
from protocol.openai.responses_writer import ResponsesWriter
from protocol.openai.tools import ToolCallPiece
from tests.protocol.test_openai_mistakes import USER
from tests.rigs.client import sse_events

USAGE = Usage(
    prompt_tokens=7,
    completion_tokens=3,
    kv=KVUsage(transferred=4, recomputed=1, skipped=2, cached_tokens=5),
    accepted_tokens=2,
    rejected_tokens=1,
)


def responses_writer(**fields: Any) -> ResponsesWriter:
    return ResponsesWriter(
        "1", 5, parse_responses({"model": "m", "input": "a", **fields})
    )


def test_response_of_a_single_piece_has_all_events():
    piece = ChoicePiece(0, "x", is_first=True, finish_reason="length")
    payload = sse_events(responses_writer().last_chunk(piece, USAGE, {}).decode())
    assert " ".join(name.removeprefix("response.") for name, _ in payload) == (
        "created in_progress output_item.added content_part.added output_text.delta "
        "output_text.done content_part.done output_item.done incomplete"
    )
    first, last = (json.loads(payload[index][1])["response"] for index in (0, -1))
    assert (first["output"], first["usage"]) == ([], None)
    assert (last["id"], last["status"], last["created_at"]) == (
        "resp_1",
        "incomplete",
        5,
    )


def test_complete_response_repeats_the_request_and_has_the_reason_why_it_ended():
    request = {"instructions": "i", "max_output_tokens": 2, "metadata": {"k": "v"}}
    writer = responses_writer(**request)
    piece = ChoicePiece(0, "ab", finish_reason="length")
    writer.add_piece(piece)
    body = json.loads(writer.complete_body([piece], USAGE, {"x": 1}))
    assert (body["status"], body["x"]) == ("incomplete", 1)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert {name: body[name] for name in request} == request
    assert body["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 2,
            "rejected_prediction_tokens": 1,
        },
        "total_tokens": 10,
    }


def test_chat_event_contains_one_kind_of_content():
    """Each event of OpenAI's own API also contains only one kind of content.

    litellm, which Claude Code uses, depends on this: if an event begins a call or has a
    finish reason, litellm drops the rest of the event.
    """
    calls = [
        ToolCallPiece(0, "", "a", "f"),
        ToolCallPiece(0, "{}"),
        ToolCallPiece(1, "", "b", "g"),
    ]
    piece = ChoicePiece(
        0, "So", [1, 2], None, "tool_calls", is_first=True, reasoning="hm"
    )
    piece.tool_calls = calls
    request = validate(
        ChatRequest, {"model": "m", "messages": [USER], "return_token_ids": True}
    )
    payload = sse_events(
        ChatWriter("1", 5, request).last_chunk(piece, USAGE, {}).decode()
    )
    chunks = [json.loads(text) for _, text in payload]
    assert ["baton_kv" in chunk for chunk in chunks] == [False] * 5 + [True]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + [
        "tool_calls"
    ]
    assert [choice["token_ids"] for choice in choices] == [[1, 2]] + [[]] * 5
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"content": "So"},
        *({"tool_calls": [call.delta()]} for call in calls),
        {},
    ]
