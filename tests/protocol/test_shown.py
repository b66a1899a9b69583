"""Values in error messages: as JSON, short, and at no cost that a client could choose."""

import sys
from typing import Any

import pytest

from protocol import kv_params
from protocol.errors import InvalidRequest, KVParamsRejected
from protocol.openai.chat import parse_chat
from protocol.openai.completions import parse_completion
from protocol.openai.requests import parse_json_object
from protocol.openai.responses_request import parse_responses
from protocol.openai.tokenize import parse_tokenize
from protocol.short_repr import short_repr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (1.0, "1.0"),
        (1e300, "1e+300"),
        ("it's", '"it\'s"'),
        ('a "b"\n', '"a \\"b\\"\\n"'),
        ("Zürich 東京", '"Zürich 東京"'),
        ("half \ud800", '"half \\ud800"'),
        ("\u202eabc", '"\\u202eabc"'),
        ([], "[]"),
        ({}, "{}"),
        ((0, 1), "[0, 1]"),
        ({"a": [True, None, {"b": "c"}], "d": 1.5}, '{"a": [true, null, {"b": "c"}], "d": 1.5}'),
        (b"x", "\"b'x'\""),
    ],
)
def test_a_value_is_shown_as_json(value: Any, text: str) -> None:
    assert short_repr(value) == text


@pytest.mark.parametrize(
    ("value", "start"),
    [
        ("x" * 200, '"xxx'),
        (["x"] * 200, '["x", "x"'),
        ({str(i): None for i in range(200)}, '{"0": null, "1": null'),
        ({"x" * 200: 1}, '{"xxx'),
        (10**200, "1000"),
    ],
)
def test_a_long_value_is_cut(value: Any, start: str) -> None:
    text = short_repr(value, 40)
    assert len(text) == 40
    assert text.startswith(start) and text.endswith("...")


def test_a_value_just_short_enough_is_whole() -> None:
    assert short_repr("x" * 38, 40) == '"' + "x" * 38 + '"'
    assert short_repr([1, 2, 3], 9) == "[1, 2, 3]"
    assert short_repr([1, 2, 3], 8) == "[1, 2..."


def test_a_value_of_any_depth_can_be_shown() -> None:
    deep: list[Any] = []
    for _ in range(2 * sys.getrecursionlimit()):
        deep = [deep]
    assert short_repr(deep) == "[" * 77 + "..."


_CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("parse", "body", "quoted"),
    [
        (parse_completion, {"model": "m", "prompt": {"a": None}}, '{"a": null}'),
        (parse_completion, {"model": "m", "prompt": "x", "temperature": True}, "true"),
        (parse_completion, {"model": "m", "prompt": "x", "stream": "False"}, '"False"'),
        (parse_completion, {"model": "m", "prompt": "x", "stop": [True]}, "[true]"),
        (parse_completion, {"model": "m", "prompt": "x", "suffix": "it's"}, '"it\'s"'),
        (parse_completion, {"model": "m", "prompt": "x", "use_beam_search": True}, "send false"),
        (parse_completion, {"model": "m", "prompt": "x", "logit_bias": {"1": "a"}}, '{"1": "a"}'),
        (parse_chat, {**_CHAT, "messages": [None]}, "`messages[0]` is null"),
        (parse_chat, {**_CHAT, "messages": {"role": False}}, '{"role": false}'),
        (parse_chat, {**_CHAT, "modalities": ["audio"]}, 'is ["audio"]'),
        (parse_chat, {**_CHAT, "modalities": ["audio"]}, 'send ["text"]'),
        (parse_chat, {**_CHAT, "tool_choice": {"type": []}}, "`tool_choice.type` is []"),
        (parse_chat, {**_CHAT, "tools": [{"type": True}]}, "`tools[0].type` is true"),
        (parse_chat, {**_CHAT, "response_format": {"type": {}}}, "`response_format.type` is {}"),
        (parse_chat, {**_CHAT, "stream_options": {"include_usage": "True"}}, '"True"'),
        (parse_chat, {**_CHAT, "guided_choice": [True]}, "[true]"),
        (parse_responses, {"model": "m", "input": [None]}, "`input[0]` is null"),
        (parse_responses, {"model": "m", "input": "x", "text": {"format": True}}, "true"),
        (parse_tokenize, {"prompt": False}, "`prompt` is false"),
        (parse_tokenize, {}, "`prompt` is null"),
    ],
)
def test_requests_are_refused_in_their_own_spelling(
    parse: Any, body: dict[str, Any], quoted: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert quoted in caught.value.message


@pytest.mark.parametrize(
    ("raw", "quoted"),
    [(b"true", "true"), (b"null", "null"), (b"[null, 'x']".replace(b"'", b'"'), '[null, "x"]')],
)
def test_bodies_that_are_no_objects_are_shown(raw: bytes, quoted: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json_object(raw)
    assert f"The body is {quoted};" in caught.value.message


@pytest.mark.parametrize(
    ("member", "value", "quoted"),
    [
        ("remote_engine_id", None, "got null"),
        ("remote_engine_id", True, "got true"),
        ("remote_port", "http", 'got "http"'),
        ("remote_block_ids", {"a": False}, 'got {"a": false}'),
    ],
)
def test_so_are_members_of_kv_transfer_params(member: str, value: Any, quoted: str) -> None:
    with pytest.raises(KVParamsRejected) as caught:
        kv_params.parse({**_SOME, member: value})
    assert quoted in caught.value.message


_SOME: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [1],
    "remote_host": "h",
}
