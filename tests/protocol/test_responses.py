"""/v1/responses: what is read, and the events of an answer."""

import json
from typing import Any

import pytest

from protocol.errors import InvalidRequest
from protocol.http.sse import SSEParser
from protocol.messages import Grammar, KVUsage
from protocol.openai.responses import ChoicePiece, Usage
from protocol.openai.responses_request import parse_responses
from protocol.openai.responses_writer import ResponsesWriter

PART = {"type": "input_text", "text": "b"}


def parse(**fields: Any) -> Any:
    return parse_responses({"model": "m", "input": "a", **fields})


def test_a_text_is_a_users_message() -> None:
    chat = parse(instructions="Be kind.", max_output_tokens=7, temperature=0.5, seed=3)
    assert [(m.role, m.content) for m in chat.messages] == [("system", "Be kind."), ("user", "a")]
    assert (chat.token_limit, chat.temperature, chat.seed, chat.stream) == (7, 0.5, 3, False)
    assert chat.guided is None


def test_a_conversation_with_an_earlier_answer_sent_back() -> None:
    answer = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x", "annotations": []}],
    }
    chat = parse(input=[{"role": "user", "content": "a"}, answer,
                        {"role": "user", "content": [PART, PART]}])  # fmt: skip
    assert [(m.role, m.content) for m in chat.messages] == [
        ("user", "a"),
        ("assistant", "x"),
        ("user", "b\nb"),
    ]


def test_a_format_is_a_demand() -> None:
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    demand = parse(text=text).guided
    assert demand.grammar == Grammar("json_schema", json.dumps(schema))
    assert demand.field == "text.format.schema"
    assert parse(text={"format": {"type": "text"}}).guided is None
    assert parse(text={}).guided is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_a_mistake_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


def writer(**fields: Any) -> ResponsesWriter:
    return ResponsesWriter("1", 5, parse(**fields).asked)


USAGE = Usage(3, 2, KVUsage(transferred=3, cached_tokens=1))


def test_events_of_a_stream() -> None:
    out = writer()
    data = out.chunk(ChoicePiece(0, "He", first=True))
    data += out.chunk(ChoicePiece(0, ""))
    data += out.last_chunk(ChoicePiece(0, "llo", finish_reason="stop"), USAGE, {}) + out.end
    events = [(name, json.loads(text)) for name, text in SSEParser().feed(data)]
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for _, event in events] == list(range(10))
    assert all(event["type"] == name for name, event in events)
    assert events[0][1]["response"]["output"] == [] and events[0][1]["response"]["usage"] is None
    final = events[-1][1]["response"]
    assert (final["id"], final["status"], final["created_at"]) == ("resp_1", "completed", 5)
    assert final["output"][0]["content"][0]["text"] == "Hello"
    assert final["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


def test_an_answer_in_one_piece_has_all_its_events() -> None:
    data = writer().last_chunk(ChoicePiece(0, "x", first=True, finish_reason="length"), USAGE, {})
    names = [name for name, _ in SSEParser().feed(data)]
    assert (names[0], names[-1]) == ("response.created", "response.incomplete")


def test_a_whole_response_tells_what_was_asked_and_why_it_ended() -> None:
    out = writer(instructions="i", max_output_tokens=2, metadata={"k": "v"})
    body = json.loads(out.full([ChoicePiece(0, "ab", finish_reason="length")], USAGE, {"x": 1}))
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert (body["instructions"], body["max_output_tokens"], body["metadata"], body["x"]) == (
        "i",
        2,
        {"k": "v"},
        1,
    )
