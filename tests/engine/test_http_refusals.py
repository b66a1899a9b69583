"""Refusals over HTTP have a status, the field at fault, and the reason."""

import asyncio
import re
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from engine.http import limits as http_limits
from engine.http.limits import guided_decodings
from engine.text.grammar_compile import MAX_GRAMMAR_CHARS
from protocol.errors import InvalidRequest
from protocol.http.json_bounds import MAX_NODES
from protocol.openai.chat import ChatRequest
from protocol.openai.requests import validate
from tests.proxy.fakes import until
from tests.rigs.http_server import (
    CONTEXT,
    MAX_BODY,
    READY,
    end,
    scripted,
    serving,
    with_template,
)
from tests.rigs.metric import metric
from tests.rigs.scripted_engine import hang

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
CONTEXT_LENGTH_CODE = "context_length_exceeded"
HI = [{"role": "user", "content": "Hi"}]
INVALID_SCHEMA = {"type": "objekt"}
NAMED_SCHEMA = {"name": "n", "schema": INVALID_SCHEMA}


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "message"),
    [
        (TEXT, {"prompt": [260]}, 400, "prompt", "token id 260; ids are from 0 to 259"),
        (TEXT, {"prompt": "x" * 64}, 400, "prompt",
         "length is 64 .* too long: it has 64. "),
        (TEXT, {"prompt": "x" * 17_000}, 400, "prompt",
         r"64 tokens and .* at least \d+"),
        (TEXT, {"prompt": [260] * 65, "max_tokens": 0}, 400, "prompt",
         "too long: it has 65"),
        (TEXT, {"n": 9}, 400, "n", "9 .* 8 sequences"),
        (TEXT, {"best_of": 9}, 400, "best_of", "9 .* 8 sequences"),
        (TEXT, {"stop_token_ids": [260]}, 400, "stop_token_ids", "id 260"),
        (TEXT, {"logit_bias": {"260": 1}}, 400, "logit_bias",
         "260; ids are from 0 to 259"),
        (TEXT, {"min_tokens": 17}, 400, "min_tokens",
         "17, but without `max_completion_tokens` at most 16 "),
        (TEXT, {"prompt": "x" * 60, "min_tokens": 5}, 400, "min_tokens",
         "5, .* at most 4 tokens"),
        # The error has the name of the limit that the client used.
        (TEXT, {"prompt": "xy", "max_tokens": 63}, 400, "max_tokens",
         "is 64 tokens.* has 2 tokens .* `max_tokens` asks for 63 .* at most 62"),
        (TEXT, {"prompt": "xy", "max_completion_tokens": 63}, 400,
         "max_completion_tokens",
         "`max_completion_tokens` asks for 63 more; lower `max_completion_tokens`"),
        (CHAT, {"max_tokens": 99, "max_completion_tokens": 98}, 400,
         "max_completion_tokens", "`max_completion_tokens` asks for 98"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 63}, 400, "max_output_tokens",
         "`max_output_tokens` asks for 63"),
        # Grammars are checked before the engine receives a request.
        (CHAT,
         {"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}}, 400,
         "response_format.json_schema.schema", "objekt"),
        (CHAT, {"structured_outputs": {"regex": "(a"}}, 400, "structured_outputs.regex",
         ""),
        (CHAT, {"guided_grammar": "start: gone"}, 400, "guided_grammar", "gone"),
        (CHAT, {"tools": [tool(INVALID_SCHEMA)], "tool_choice": "required"}, 400,
         "tools[0].function.parameters", "objekt"),
        (RESPONSES,
         {"input": "Hi",
          "tools": [{"type": "function", **tool(INVALID_SCHEMA)["function"]}],
          "tool_choice": "required"}, 400, "tools[0].parameters", "objekt"),
        (CHAT, {"tools": [tool({"type": "object", "not": {"required": ["a"]}})],
                "tool_choice": "required"}, 400, "tools[0].function.parameters", ""),
        ("/tokenize", {}, 400, "prompt", ""),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt",
         "either `prompt` or"),
        ("/tokenize", {"prompt": [1]}, 400, "prompt", "a string"),
        ("/tokenize", {"prompt": "a", "speed": 1}, 400, "speed", ""),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model",
         "this server serves"),
        ("/detokenize", {}, 400, "tokens", ""),
        *[("/detokenize", {"tokens": ids}, 400, "tokens", "") for ids in (
            [260], "1", [1, "1"], [1, 1.5], [1, True], [[1]], [1, 10**30], None)],
    ],
)  # fmt: skip
async def test_bad_input_is_refused_clearly(
    tokenizer, path, fields, status, param, message
):
    prompt_fields = {TEXT: {"prompt": "ab"}, CHAT: {"messages": HI}}.get(path, {})
    is_grammar = (
        path == CHAT and 1 not in fields.values() and "max_tokens" not in fields
    )
    ready = replace(READY, max_model_len=4096) if is_grammar else READY
    async with serving(tokenizer, ready=ready) as server:
        response = await server.http.post(
            path, json={"model": "m", **prompt_fields, **fields}
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param)
        assert re.search(message, error["message"])
        assert (error["code"] == CONTEXT_LENGTH_CODE) == (
            "context length" in error["message"]
        )
        assert error["type"] == "invalid_request_error" and error["retryable"] is False
        assert server.engine.added == []
        assert metric(server.metrics, "baton_requests_in_progress") == 0
        assert (await server.post()).status_code == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), (RESPONSES, "input"), ("/tokenize", "messages")],
)
async def test_template_refusal_names_the_clients_field(tokenizer, path, field):
    strict = with_template(tokenizer, "{{ raise_exception('Roles must alternate') }}")
    async with serving(strict) as server:
        response = await server.http.post(path, json={"model": "m", field: HI})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field)
        assert "must alternate" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 3, "n": 4}, "n"),
        ({"prompt": ["a"] * 3, "best_of": 4}, "best_of"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a"] * 8}, None),
        ({"prompt": "a", "n": 8, "max_tokens": 60}, None),
    ],
)
async def test_prompts_times_choices_and_tokens_are_bounded(
    tokenizer, monkeypatch, fields, param
):
    # With 0 tokens, only the limit of 8 sequences applies.
    monkeypatch.setattr(http_limits, "MAX_REQUEST_TOKENS", 0)
    script = scripted(*(end(choice) for choice in range(fields.get("n", 1))))
    async with serving(tokenizer, script) as server:
        response = await server.post(**fields)
        assert (response.status_code == 200) == (param is None)
        if param is not None:
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            max_tokens = 8 * http_limits.MIN_CHOICE_TOKENS
            assert f"the limit is {max_tokens} tokens" in error["message"]
            assert server.engine.added == []


def test_schemas_of_all_tools_share_a_limit():
    long = {"type": "object", "description": "x" * 3000}
    tools = [tool(long, f"f{i}") for i in range(50)]
    body = {"model": "m", "messages": HI, "tools": tools}
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_CHARS)) as caught:
        guided_decodings(validate(ChatRequest, {**body, "tool_choice": "required"}))
    assert caught.value.param == "tools"
    assert guided_decodings(validate(ChatRequest, body)) == [], (
        "schemas of optional tools are not enforced"
    )


# -- bodies and connections ------------------------------------------------------------


async def test_fields_added_by_a_proxy_do_not_count_towards_the_limit(
    tokenizer, monkeypatch
):
    added = {"note": "x" * MAX_BODY}  # such as the logprobs of a long prompt
    async with serving(tokenizer) as server:
        assert (await server.post(kv_transfer_params=added)).status_code == 200
        released = {"kv_transfer_params": added}
        assert (await server.http.post("/release_kv", json=released)).status_code == 200
        response = await server.post(kv_transfer_params=added, user="x" * MAX_BODY)
        assert response.status_code == 413
        assert f"limit is {MAX_BODY} bytes" in response.json()["error"]["message"]
        monkeypatch.setattr("engine.http.middleware.MAX_MARKS", 100)
        # Many values are refused, because decoding them delays all streams.
        for values, status in ((41, 200), (42, 413)):
            many = {**added, "values": [[]] * values}
            assert (await server.post(kv_transfer_params=many)).status_code == status


async def test_server_full_of_bodies_still_accepts_releases_and_operator_orders(
    tokenizer,
):
    """Releases and migrations free memory, so the limit must not refuse them."""
    async with serving(tokenizer, hang, max_held_bytes=1) as server:
        request = asyncio.create_task(server.post())
        await until(lambda: bool(server.engine.added))
        posts = [
            ("/release_kv", {}),
            ("/migrate", {"requests": 1}),
            (TEXT, {"prompt": "ab"}),
        ]
        statuses = [
            (await server.http.post(path, json=fields)).status_code
            for path, fields in posts
        ]
        request.cancel()
        assert statuses == [200, 200, 429]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, '"model": "m", "prompt": %s'),
        (CHAT, '"model": "m", "messages": [], "guided_json": %s'),
        (RESPONSES, '"model": "m", "input": %s'),
        ("/tokenize", '"messages": [{"role": "user", "content": %s}]'),
    ],
)
async def test_body_of_any_depth_is_a_client_error(tokenizer, path, fields):
    """Some depths can be parsed, but overflow the stack when the error is written."""
    depths = range(sys.getrecursionlimit() - 150, sys.getrecursionlimit())
    bodies = ["{" + fields % ("[" * depth + "]" * depth) + "}" for depth in depths]
    async with serving(tokenizer) as server:
        posts = [server.http.post(path, content=body) for body in bodies]
        for response in await asyncio.gather(*posts):
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES, "/tokenize", "/detokenize"])
async def test_bodies_of_too_many_members_are_refused_with_the_number_and_the_limit(
    tokenizer, path
):
    body = b'{"model":"m","metadata":[' + b"{}," * MAX_NODES + b"{}]}"
    async with serving(tokenizer, max_body=len(body)) as server:
        response = await server.http.post(path, content=body)
    assert response.status_code == 413
    message = response.json()["error"]["message"]
    assert f"{MAX_NODES + 5} JSON members" in message
    assert f"the limit is {MAX_NODES}" in message


async def test_unknown_routes_and_methods_are_refused_with_a_typed_error(tokenizer):
    async with serving(tokenizer) as server:
        missing = await server.http.get("/v2/completions")
        assert (missing.status_code, missing.json()["error"]["code"]) == (
            404,
            "not_found",
        )
        wrong = await server.http.get(TEXT)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (
            405,
            "method_not_allowed",
        )
        assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path",
    ["/health", "/ready", "/metrics?name=x", "/docs", "/openapi.json", "/v1/models/m"],
)
async def test_head_gets_the_answer_of_get_without_its_body(tokenizer, path):
    async with serving(tokenizer) as server:
        get_response = await server.http.get(path)
        head_response = await server.http.head(path)
        assert (head_response.status_code, head_response.content) == (
            get_response.status_code,
            b"",
        ) and head_response.is_success
        assert (
            head_response.headers["content-type"]
            == get_response.headers["content-type"]
        )
        assert "content-length" in head_response.headers
        refused = await server.http.delete(path)
        assert refused.status_code == 405
        assert sorted(refused.headers["allow"].split(", ")) == ["GET", "HEAD"]


async def test_longest_prompt_and_answer_that_fit_are_served(tokenizer):
    async with serving(tokenizer) as server:
        body = (await server.post(prompt="x" * (CONTEXT - 1))).json()
        assert body["usage"]["completion_tokens"] == 1
        body = (await server.post(prompt="xy", max_tokens=CONTEXT - 2)).json()
        assert body["usage"]["total_tokens"] == CONTEXT
