"""/v1/responses: sampling fields and log-probabilities, read by OpenAI's client."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.responses import (
    Response,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, Grammar, TokenDelta, TokenLogprobs
from tests.engine.test_harmony import CALL as HARMONY_CALL
from tests.engine.test_harmony import FINAL, START, THINK
from tests.engine.test_http_responses import FLAT, TEMPLATE, client_of
from tests.engine.test_http_tools import CALL
from tests.rigs.http_server import (
    USAGE,
    serving_4k,
    serving_harmony,
    text_script,
    with_template,
)

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
LOGPROBS = "message.output_text.logprobs"

# Fields that /v1/chat/completions also has, with one value each.
SHARED: dict[str, Any] = {
    "top_k": 7,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 3},
    "stop_token_ids": [9],
    "min_tokens": 2,
    "allowed_token_ids": [97, 98, 256],
    "bad_words": ["ab"],
    "structured_outputs": {"regex": "a+"},
    "chat_template_kwargs": {"enable_thinking": 5},
    "temperature": 0.5,
    "top_p": 0.5,
    "ignore_eos": True,
    "priority": 3,
}


@pytest.mark.parametrize("name", SHARED)
async def test_field_has_the_same_effect_as_in_a_chat(name, tokenizer):
    templated = with_template(
        tokenizer, TEMPLATE.replace("reasoning_effort", "enable_thinking")
    )
    field = {name: SHARED[name]}
    async with serving_4k(templated, text_script(templated, "ok")) as server:
        plain = {"seed": 1, "model": "m", "input": "Hi"}
        bodies: list[tuple[str, dict[str, Any]]] = [
            (RESPONSES, plain),
            (RESPONSES, {**plain, **field}),
            (
                CHAT,
                {"seed": 1, "messages": [{"role": "user", "content": "Hi"}], **field},
            ),
        ]
        for path, body in bodies:
            answer = await server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        without, response, chat = (_without_id(add) for add in server.engine.added)
        assert response == chat
        assert response != without


def _without_id(add: AddRequest) -> dict[str, Any]:
    return {
        name: getattr(add, name)
        for name in add.__struct_fields__
        if name != "request_id"
    }


async def test_stop_string_ends_a_response(tokenizer):
    async with serving_4k(tokenizer, text_script(tokenizer, "one two three")) as server:
        body = {"model": "m", "input": "Hi", "stop": " two"}
        response = Response.model_validate(
            (await server.http.post(RESPONSES, json=body)).json()
        )
    assert (response.output_text, response.status) == ("one", "completed")


async def test_contradictions_are_named_by_the_fields_of_this_endpoint(tokenizer):
    mistakes: list[tuple[dict[str, Any], str, str]] = [
        ({"top_logprobs": 3}, "top_logprobs", LOGPROBS),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "0 to 20"),
        ({"include": ["file_search_call.results"]}, "include", LOGPROBS),
        ({"include": LOGPROBS}, "include", "a list"),
        ({"stop": ""}, "stop", "none of them empty"),
        (
            {"min_tokens": 5, "max_output_tokens": 4},
            "min_tokens",
            "`max_output_tokens`",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs",
            "one of",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "`tools`"),
        (
            {
                "structured_outputs": {"regex": "a"},
                "text": {"format": {"type": "json_object"}},
            },
            "structured_outputs.regex",
            "both set",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
    ]
    async with serving_4k(tokenizer) as server:
        for fields, param, words in mistakes:
            answer = await server.http.post(RESPONSES, json={"input": "Hi", **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), fields
            assert words in error["message"], fields


async def test_json_objects_may_have_a_schema(tokenizer):
    request = {
        "input": "Hi",
        "text": {"format": {"type": "json_object", "schema": {"type": "null"}}},
    }
    async with serving_4k(tokenizer, text_script(tokenizer, "null")) as server:
        assert (await server.http.post(RESPONSES, json=request)).status_code == 200
        grammar = server.engine.added[0].sampling.grammar
        assert grammar == Grammar("json_schema", '{"type": "null"}')


# -- log-probabilities -----------------------------------------------------------------


def saying_with_logprobs(tokenizer: Tokenizer, text: str) -> Any:
    """Returns a script that generates `text`. Token n has the logprob -n / 8. The most
    likely token is always "A", with the logprob -n / 16."""

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        assert request.sampling.num_logprobs is not None
        for i, token_id in enumerate(tokenizer.encode(text)):
            actual = TokenLogprobs(-i / 8, tokenizer.encode("A"), [-i / 16])
            ids = [token_id]
            yield TokenDelta(
                request_id=request.request_id, token_ids=ids, logprobs=[actual]
            )
        yield TokenDelta(
            request_id=request.request_id, finish_reason="stop", usage=USAGE
        )

    return script


# The model's text, and the texts of the messages in the response.
OUTPUTS = [
    ("añb", ["añb"]),
    ("<think>I add.</think>So", ["So"]),
    (f"So:{CALL}Hm.", ["So:", "Hm."]),
    (CALL, []),
    ("a <tool", ["a <tool"]),
]


@pytest.mark.parametrize("num_top", [0, 1])
@pytest.mark.parametrize(("text", "messages"), OUTPUTS)
async def test_each_message_has_the_log_probabilities_of_its_tokens(
    tokenizer, text, messages, num_top
):
    templated = with_template(tokenizer, TEMPLATE)
    request: Any = {"model": "m", "input": "Hi", "tools": [FLAT], "include": [LOGPROBS]}
    request["top_logprobs"] = num_top
    async with serving_4k(templated, saying_with_logprobs(templated, text)) as server:
        async with client_of(server) as client:
            complete_response = await client.responses.create(**request)
            async with client.responses.stream(**request) as stream:
                stream_events = [event async for event in stream]
                final = await stream.get_final_response()
    assert complete_response.top_logprobs == num_top
    actual = [
        _logprobs_of(item)
        for item in complete_response.output
        if item.type == "message"
    ]
    assert actual == [
        _logprobs_of(item) for item in final.output if item.type == "message"
    ]
    ids = templated.encode(text)
    for message, logprobs in zip(messages, actual, strict=True):
        raw = b"".join(bytes(entry["bytes"]) for entry in logprobs)
        assert raw.decode() == message
        begin = text.encode().index(raw)  # each token is one byte
        assert [entry["logprob"] for entry in logprobs] == [
            -(begin + i) / 8 for i in range(len(raw))
        ]
        for i, entry in enumerate(logprobs):
            top = [{"token": "A", "logprob": -(begin + i) / 16, "bytes": [65]}]
            assert entry["top_logprobs"] == top[:num_top]
            assert entry["token"] == templated.token_text(ids[begin + i]).text
    deltas = [
        event for event in stream_events if isinstance(event, ResponseTextDeltaEvent)
    ]
    assert "".join(event.delta for event in deltas) == "".join(messages)
    streamed = [entry.logprob for event in deltas for entry in event.logprobs]
    ends = [
        event for event in stream_events if isinstance(event, ResponseTextDoneEvent)
    ]
    assert (
        streamed
        == [entry["logprob"] for logprobs in actual for entry in logprobs][
            : len(streamed)
        ]
    )
    assert [[entry.logprob for entry in event.logprobs] for event in ends] == [
        [entry["logprob"] for entry in logprobs] for logprobs in actual
    ]


async def test_in_harmony_only_final_text_has_log_probabilities(harmony):
    text = f"{THINK}hm<|end|>{START}{FINAL}Ah<|end|>{START}{HARMONY_CALL}{{}}<|call|>"
    request: Any = {"model": "m", "input": "Hi", "tools": [FLAT], "include": [LOGPROBS]}
    async with serving_harmony(harmony, saying_with_logprobs(harmony, text)) as server:
        async with client_of(server) as client:
            complete_response = await client.responses.create(**request)
    assert [item.type for item in complete_response.output] == [
        "reasoning",
        "message",
        "function_call",
    ]
    assert [entry["token"] for entry in _logprobs_of(complete_response.output[1])] == [
        "A",
        "h",
    ]


def _logprobs_of(item: Any) -> list[dict[str, Any]]:
    (part,) = item.model_dump()["content"]
    logprobs: list[dict[str, Any]] = part["logprobs"]
    return logprobs


async def test_response_has_log_probabilities_only_on_request(tokenizer):
    async with serving_4k(tokenizer, text_script(tokenizer, "ok")) as server:
        body = {"input": "Hi", "include": ["reasoning.encrypted_content"]}
        response = (await server.http.post(RESPONSES, json=body)).json()
        assert response["output"][0]["content"][0]["logprobs"] == []
        assert server.engine.added[0].sampling.num_logprobs is None
