"""Answers have OpenAI's shapes, whole and as events."""

import json
from typing import Any

import msgspec

from protocol.http.sse import SSEParser
from protocol.messages import KVUsage
from protocol.openai.completions import CompletionRequest
from protocol.openai.logprobs import TokenReport, TokenText
from protocol.openai.requests import validate
from protocol.openai.responses import (
    ChatWriter,
    ChoicePiece,
    CompletionWriter,
    Usage,
    add_kv,
    kv_header,
)
from protocol.openai.responses_request import parse_responses
from protocol.openai.responses_writer import ResponsesWriter
from protocol.openai.tools import ToolCallPiece, whole_calls

USAGE = Usage(7, 3, KVUsage(transferred=4, recomputed=1, skipped=2, cached_tokens=5))


def completion(**fields: Any) -> CompletionRequest:
    return validate(CompletionRequest, {"model": "m", "prompt": "a", **fields})


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(text) for _, text in SSEParser().feed(data)]


def test_a_whole_completion_has_usage_and_extras() -> None:
    piece = ChoicePiece(0, "Hi", [4, 5], finish_reason="stop", prompt_token_ids=[1])
    writer = CompletionWriter("x", 12, completion(return_token_ids=True))
    body = json.loads(writer.full([piece], USAGE, {"kv_transfer_params": {"a": 1}}))
    assert body["id"] == "cmpl-x" and body["object"] == "text_completion" and body["created"] == 12
    choice = {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [{**choice, "token_ids": [4, 5], "prompt_token_ids": [1]}]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert body["kv_transfer_params"] == {"a": 1}
    assert kv_header(USAGE) == "transferred=4, recomputed=1, skipped=2"


def test_a_chat_stream_names_the_role_once_and_the_usage_last() -> None:
    writer = ChatWriter("x", 12, completion(stream_options={"include_usage": True}))
    first, second = ChoicePiece(0, "Hi", first=True), ChoicePiece(0, "", finish_reason="length")
    chunks = events(writer.chunk(first) + writer.last_chunk(second, USAGE, {}))
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        ("chatcmpl-x", 12, "m", "chat.completion.chunk")
    }
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Hi"}
    assert chunks[1]["choices"][0]["delta"] == {}
    assert chunks[1]["choices"][0]["finish_reason"] == "length"
    assert [c["usage"] and c["usage"]["total_tokens"] for c in chunks] == [None, None, 10]
    assert chunks[2]["choices"] == []
    assert chunks[2]["baton_kv"] == {"transferred": 4, "recomputed": 1, "skipped": 2}
    assert not any("baton_kv" in chunk for chunk in chunks[:2])


def test_without_usage_the_last_chunk_is_the_one_that_finishes() -> None:
    writer = CompletionWriter("x", 12, completion())
    (chunk,) = events(writer.last_chunk(ChoicePiece(0, "!", finish_reason="stop"), USAGE, {}))
    assert chunk["choices"][0]["text"] == "!" and "usage" not in chunk
    assert chunk["baton_kv"]["transferred"] == 4


def test_pieces_add_up() -> None:
    one, two = TokenReport(TokenText("a", b"a"), -1.0), TokenReport(TokenText("b", b"b"), -2.0)
    piece = ChoicePiece(0, "a", [1], [one])
    piece.extend(ChoicePiece(0, "b", [2], [two], "stop", "b"))
    assert piece == ChoicePiece(0, "ab", [1, 2], [one, two], "stop", "b")
    kv = KVUsage(transferred=1, recomputed=2, skipped=3, cached_tokens=4)
    assert msgspec.structs.astuple(add_kv([kv, kv])) == (2, 4, 6, 8)


def test_pieces_become_whole_calls() -> None:
    pieces = [
        ToolCallPiece(0, "", "call_a", "f"),
        ToolCallPiece(0, '{"x":'),
        ToolCallPiece(0, "1}"),
        ToolCallPiece(1, "{}", "call_b", "g"),
    ]
    function = {"name": "f", "arguments": ""}
    assert pieces[0].delta() == {
        "index": 0,
        "id": "call_a",
        "type": "function",
        "function": function,
    }
    assert pieces[1].delta() == {"index": 0, "function": {"arguments": '{"x":'}}
    assert whole_calls(pieces) == [
        {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert pieces[0].arguments == ""


# -- /v1/responses -------------------------------------------------------------------------------


def responses_writer(**fields: Any) -> ResponsesWriter:
    return ResponsesWriter("1", 5, parse_responses({"model": "m", "input": "a", **fields}))


def test_events_of_a_stream() -> None:
    out = responses_writer()
    data = out.chunk(ChoicePiece(0, "He", first=True))
    data += out.chunk(ChoicePiece(0, ""))
    data += out.last_chunk(ChoicePiece(0, "llo", finish_reason="stop"), USAGE, {}) + out.end
    told = [(name, json.loads(text)) for name, text in SSEParser().feed(data)]
    assert " ".join(name.removeprefix("response.") for name, _ in told) == (
        "created in_progress output_item.added content_part.added output_text.delta "
        "output_text.delta output_text.done content_part.done output_item.done completed"
    )
    assert [event["sequence_number"] for _, event in told] == list(range(10))
    assert all(event["type"] == name for name, event in told)
    assert told[0][1]["response"]["output"] == [] and told[0][1]["response"]["usage"] is None
    final = told[-1][1]["response"]
    assert (final["id"], final["status"], final["created_at"]) == ("resp_1", "completed", 5)
    assert final["output"][0]["content"][0]["text"] == "Hello"
    assert final["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 5},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }


def test_an_answer_in_one_piece_has_all_its_events() -> None:
    piece = ChoicePiece(0, "x", first=True, finish_reason="length")
    names = [name for name, _ in SSEParser().feed(responses_writer().last_chunk(piece, USAGE, {}))]
    assert (names[0], names[-1]) == ("response.created", "response.incomplete")


def test_a_whole_response_tells_what_was_asked_and_why_it_ended() -> None:
    asked = {"instructions": "i", "max_output_tokens": 2, "metadata": {"k": "v"}}
    out = responses_writer(**asked)
    body = json.loads(out.full([ChoicePiece(0, "ab", finish_reason="length")], USAGE, {"x": 1}))
    assert (body["status"], body["x"]) == ("incomplete", 1)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert {name: body[name] for name in asked} == asked
