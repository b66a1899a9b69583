"""JSON schemas over HTTP: numbers stay exact, and only schemas that must be enforced
are refused.
"""

import json
from typing import Any

import pytest

from protocol.openai.requests import BODIES, supported_fields
from tests.engine.test_exact_schemas import IDS, INT64, matches
from tests.rigs.http_server import serving_4k, text_script

EXACT = '{"type":"object","properties":{"id":{"enum":[%s]}},"required":["id"]}'
NUMBERS = [
    "1234567890123456789",
    str(10**40),
    "0.30000000000000004441",
    "0.1",
    "-3",
    "12.50",
]
NAMED_TOOL = '{"type":"function","function":{"name":"f"}}'

# Schemas that agents send, with keywords that cannot be enforced.
UNENFORCEABLE: list[Any] = [
    {"type": "object", "properties": {"n": {"type": "integer", **INT64}}},
    {
        "type": "object",
        "properties": {"n": {"type": "number", "maximum": 3.4028234663852886e38}},
    },
    {
        "type": "object",
        "properties": {"n": {"type": "string", "format": "uri-reference"}},
    },
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "integer", "multipleOf": 4_999_999},
    {"type": "objekt", "properties": 3, "required": True},
    {
        "properties": {"n": "string", "m": [1], "k": {"type": {}}},
        "anyOf": {},
        "oneOf": [1, {}],
    },
    {"$ref": "https://example.com/schema"},
]


def call(name: str, arguments: str, parser: str) -> str:
    if parser == "hermes":
        return (
            f'<tool_call>{{"name": "{name}", '
            f'"arguments": {{"n": {arguments}}}}}</tool_call>'
        )
    parameter = f"<parameter=n>\n{arguments}\n</parameter>"
    return f"<tool_call>\n<function={name}>\n{parameter}\n</function>\n</tool_call>"


def function(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "field",
    [
        '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}],'
        '"tool_choice":"required"',
        '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}],'
        '"tool_choice":' + NAMED_TOOL,
        '"response_format":{"type":"json_schema",'
        '"json_schema":{"name":"n","schema":%s}}',
        '"structured_outputs":{"json":%s}',
        '"guided_json":%s',
        '"guided_json":"%s"',
    ],
)
async def test_numbers_reach_the_engine_as_they_were_sent(tokenizer, field):
    schema = EXACT % ",".join(NUMBERS)
    schema = schema.replace('"', r"\"") if '"%s"' in field else schema
    body = (
        '{"model":"m","messages":[{"role":"user","content":"Hi"}],'
        + field % schema
        + "}"
    )
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        response = await server.http.post("/v1/chat/completions", content=body)
        assert response.status_code == 200, response.text
        (add,) = server.engine.added
        grammar = add.sampling.grammar
        assert grammar is not None
        head, tail = (
            ('[{"name": "f", "parameters": ', "}]")
            if grammar.kind == "calls"
            else ("", "")
        )
        for number in NUMBERS:
            written = number.rstrip("0") if "." in number else number
            assert any(
                matches(grammar, f'{head}{{"id": {digits}}}{tail}')
                for digits in (number, written)
            ), number
        for wrong in (
            "1234567890123456768",
            str(10**40 + 1),
            "0.30000000000000004",
            "12.6",
        ):
            assert not matches(grammar, f'{head}{{"id": {wrong}}}{tail}')


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("parameters", UNENFORCEABLE, ids=range(len(UNENFORCEABLE)))
async def test_optional_tools_may_have_schemas_that_cannot_be_enforced(
    tokenizer, parameters, parser
):
    script = text_script(tokenizer, call("f", "7", parser), finish_reason="stop")
    async with serving_4k(tokenizer, script, tool_call_parser=parser) as server:
        tools = [function("f", parameters), function("g", {"type": "object"})]
        for choice in ("auto", None):
            response = await server.chat(tools=tools, tool_choice=choice)
            assert response.status_code == 200, response.text
            (tool_call,) = response.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(tool_call["function"]["arguments"])["n"] in (7, "7")
        # Only the tool that `tool_choice` names needs a schema that can be enforced.
        named = {"type": "function", "function": {"name": "g"}}
        assert (await server.chat(tools=tools, tool_choice=named)).status_code == 200


async def test_required_tool_is_refused_by_the_field_of_that_tool(tokenizer):
    fine = function(
        "g", {"type": "object", "properties": {"n": {"type": "integer", **INT64}}}
    )
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        assert (
            await server.chat(tools=[fine], tool_choice="required")
        ).status_code == 200
        odd = function("f", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]})
        response = await server.chat(tools=[fine, odd], tool_choice="required")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (
            400,
            "tools[1].function.parameters",
        )
        assert "`oneOf` has options 0 and 1" in error["message"]


async def test_decimals_beyond_float64_are_enforced_or_refused_by_their_path(tokenizer):
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        body = '{"model":"m","prompt":"a","guided_json":{"items":{"maximum":%s}}%s}'
        response = await server.http.post(
            "/v1/completions", content=body % ("1e350", "")
        )
        assert response.status_code == 200
        grammar = server.engine.added[0].sampling.grammar
        assert grammar is not None and matches(grammar, f"[1{'0' * 350}]")
        assert not matches(grammar, f"[2{'0' * 350}]")
        for field, more in (
            ("guided_json", ""),
            ("temperature", ',"temperature":1e400'),
        ):
            response = await server.http.post(
                "/v1/completions", content=body % ("1e400", more)
            )
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field)
            assert "`items.maximum`" in error["message"] or field == "temperature"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
async def test_no_field_fails_the_server_with_a_number_beyond_float64(tokenizer, path):
    needed = {
        "prompt": '"a"',
        "messages": '[{"role":"user","content":"Hi"}]',
        "input": '"Hi"',
        "max_tokens": "9",
    }
    used = supported_fields(BODIES[path])
    required_fields = {name: text for name, text in needed.items() if name in used}
    async with serving_4k(
        tokenizer, text_script(tokenizer, "x", finish_reason="stop")
    ) as server:
        for name in sorted(used):
            for value in ("1e999", "-1e999", '{"a":1e999}', "[1e999]", '[{"a":1e999}]'):
                members = {"model": '"m"', **required_fields, name: value}
                body = ",".join(f'"{key}":{text}' for key, text in members.items())
                response = await server.http.post(path, content=f"{{{body}}}")
                assert response.status_code < 500, (name, value, response.text)
                assert "Infinity" not in response.text or response.status_code == 400


@pytest.mark.parametrize("number", [*NUMBERS, str(IDS[0]), "1e400", "1.0"])
async def test_numbers_of_a_call_reach_the_client_as_the_model_wrote_them(
    tokenizer, number
):
    for parser in ("hermes", "qwen3_coder"):
        script = text_script(tokenizer, call("f", number, parser), finish_reason="stop")
        async with serving_4k(tokenizer, script, tool_call_parser=parser) as server:
            schema = {"type": "object", "properties": {"n": {"type": "number"}}}
            response = await server.chat(tools=[function("f", schema)])
            (tool_call,) = response.json()["choices"][0]["message"]["tool_calls"]
            assert tool_call["function"]["arguments"] == f'{{"n": {number}}}', parser
