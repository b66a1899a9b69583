"""Tools and `tool_choice` over HTTP: the prompt, the grammar and the response."""

import json
from typing import Any

import pytest

from engine.text.tool_formats import call_beginnings
from engine.text.tool_messages import add_tools
from engine.text.tool_parser import create_tool_parser
from protocol.messages import Grammar
from protocol.openai.tools import Tools, whole_calls
from tests.rigs.http_server import chunks, serving_4k, text_script, with_template

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer"}},
        },
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}
USER = {"role": "user", "content": "1 + 1?"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def call_of(choice: dict[str, Any]) -> tuple[str, str]:
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    return call["function"]["name"], call["function"]["arguments"]


def reasoning_and_content(choice: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the reasoning and the content of a message."""
    return choice["message"].get("reasoning_content"), choice["message"]["content"]


@pytest.mark.parametrize(
    ("text", "fields", "content"),
    [
        ("Let me see." + CALL, {}, "Let me see."),
        (
            '[{"name": "add", "parameters": {"a": 1}}]',
            {"tool_choice": "required"},
            None,
        ),
        ('{"a": 1}', {"tool_choice": NAMED}, None),
    ],
)
async def test_call_is_the_same_with_and_without_a_stream(
    tokenizer, text, fields, content
):
    script = text_script(tokenizer, text, finish_reason="stop")

    async with serving_4k(tokenizer, script) as server:
        request = {"tools": [TOOL], **fields}
        (choice,) = (await server.chat(**request)).json()["choices"]
        assert call_of(choice) == ("add", '{"a": 1}')
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == content
        streamed = chunks(await server.chat(stream=True, **request))
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        assert "".join(delta.get("content") or "" for delta in deltas) == (
            content or ""
        )
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0] * len(calls) and len(calls) > 1
        assert [call.get("id") is not None for call in calls] == [True] + [False] * (
            len(calls) - 1
        )
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
        assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_client_without_parallel_calls_gets_no_second_call(tokenizer):
    """With tool_choice "auto", no grammar prevents the model from writing two calls."""
    script = text_script(tokenizer, f"Both: {CALL}{CALL} done", finish_reason="stop")
    request = {"tools": [TOOL], "parallel_tool_calls": False}
    async with serving_4k(tokenizer, script) as server:
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 2
        (choice,) = (await server.chat(**request)).json()["choices"]
        assert call_of(choice) == ("add", '{"a": 1}')
        assert choice["message"]["content"] == "Both: done"
        streamed = chunks(await server.chat(stream=True, **request))
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert {call["index"] for call in calls} == {0}
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'


async def test_answer_without_calls_is_unchanged(tokenizer):
    async with serving_4k(
        tokenizer, text_script(tokenizer, "a < b", finish_reason="stop")
    ) as server:
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
        assert choice["message"]["content"] == "a < b"
        assert (
            "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
        )
        (choice,) = (await server.chat(tools=[TOOL], tool_choice="none")).json()[
            "choices"
        ]
        assert choice["message"]["content"] == "a < b"


async def test_engine_receives_the_grammar_of_required_calls(tokenizer):
    email = {"pattern": {"type": "string", "pattern": r"^(?!\.)[a-z]+@[a-z]+$"}}
    odd = {
        "name": "f",
        "parameters": {"not": {"required": ["a"]}, "anyOf": [{"properties": email}]},
    }
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        # This schema cannot be enforced, and need not be, because its tool is optional.
        await server.chat(tools=[TOOL, {"type": "function", "function": odd}])
        await server.chat(tools=[TOOL], tool_choice=NAMED)
        await server.post(structured_outputs={"regex": "a+"})
        auto, named, regex = (add.sampling.grammar for add in server.engine.added)
        assert auto is None and regex == Grammar("regex", "a+")
        assert (
            named is not None
            and json.loads(named.text) == TOOL["function"]["parameters"]
        )
        # A response format applies only to text. The model may or must call a tool
        # instead.
        request: dict[str, Any] = {
            "tools": [TOOL],
            "response_format": {"type": "json_object"},
        }
        for choice in ("auto", "none", NAMED):
            assert (await server.chat(tool_choice=choice, **request)).status_code == 200
        either, answer, call = (add.sampling.grammar for add in server.engine.added[3:])
        assert either == Grammar("json_object", calls=("<tool_call>",))
        assert answer == Grammar("json_object") and call == named


def test_call_beginnings_of_each_format(tokenizer):
    tools = Tools((TOOL,), "auto")
    templated = with_template(tokenizer, "{{ tools }} [TOOL_CALLS]")
    templated.special_ids = {ord("[")}
    templated.id_of = {"[TOOL_CALLS]": ord("[")}.get
    assert call_beginnings(tools, "auto", templated) == (ord("["),)
    assert call_beginnings(tools, "pythonic", templated) == (
        "<|python_start|>",
        "[add(",
    )
    assert call_beginnings(tools, "llama3_json", templated) == (
        "<|python_tag|>",
        '{"name": "add"',
    )
    assert call_beginnings(Tools((TOOL,), "none"), "hermes", templated) == ()


# -- the prompt ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_template_without_tools_gets_a_system_message(tokenizer, mode):
    tools = Tools((TOOL,), mode, "add" if mode == "named" else None)
    messages, offered = add_tools([USER], tools, tokenizer)
    assert offered is None and [m["role"] for m in messages] == ["system", "user"]
    assert '"name": "add"' in messages[0]["content"]
    system = {"role": "system", "content": "Be kind."}
    joined, _ = add_tools([system, USER], tools, tokenizer)
    assert [m["role"] for m in joined] == ["system", "user"]
    assert joined[0]["content"] == "Be kind.\n\n" + messages[0]["content"]


@pytest.mark.parametrize("option", ["auto", "deepseek_v3", "llama3_json"])
@pytest.mark.parametrize(
    "source", ["{{ messages }}", "{{ messages }} {{ tool_calls }}"]
)
def test_system_message_describes_the_format_that_is_parsed(tokenizer, source, option):
    """DeepSeek's templates write earlier calls, but do not use `tools`."""
    templated = with_template(tokenizer, source)
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add"}}],
    }
    tools = Tools((TOOL,), "auto")
    (system_message, plain), _ = add_tools([turn], tools, templated, option)
    (call_format,) = (
        line for line in system_message["content"].splitlines() if "<its name>" in line
    )
    call = call_format.replace("<an object of its parameters>", '{"a": 1}')
    call = call.replace("<its name>,", '"add",').replace("<its name>", "add")
    parser = create_tool_parser(tools, option, templated.chat_template)
    assert parser is not None
    pieces = parser.feed(call).calls + parser.finish().calls
    assert whole_calls(pieces)[0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1}',
    }
    is_native = option != "auto" and "tool_calls" in source
    assert ("tool_calls" in plain) == is_native


def test_template_may_concatenate_the_arguments_of_a_call_or_write_json(tokenizer):
    """DeepSeek's template concatenates the arguments of a call with text."""
    turn = {
        "role": "assistant",
        "tool_calls": [{"function": {"arguments": {"a": "\u00e9"}}}],
    }
    for source in ("'<' + f.arguments + '>'", "'<' ~ f.arguments | tojson ~ '>'"):
        templated = with_template(
            tokenizer,
            "{% set f = messages[0].tool_calls[0].function %}{{ " + source + " }}",
        )
        assert templated.render_chat([turn]) == '<{"a": "\u00e9"}>'


async def test_calls_are_read_in_the_templates_format(tokenizer):
    """The template is Mistral's. A required call has a different format, but still the
    short ids that Mistral's template requires."""
    templated = with_template(tokenizer, "{{ tools | length }} [TOOL_CALLS]")
    for text, request in (
        ('Both: [TOOL_CALLS]add[ARGS]{"a": 1}', {}),
        ('[{"name": "add", "parameters": {"a": 1}}]', {"tool_choice": "required"}),
    ):
        async with serving_4k(
            templated, text_script(templated, text, finish_reason="stop")
        ) as server:
            (choice,) = (await server.chat(tools=[TOOL], **request)).json()["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
            assert len(call["id"]) == 9 and call["id"].isalnum()


def test_template_without_tools_gets_earlier_calls_as_text(tokenizer):
    function = {"name": "add", "arguments": {"a": 1}}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    (plain,), _ = add_tools([turn], Tools(), tokenizer)
    assert plain == {"role": "assistant", "content": CALL}
    parser = create_tool_parser(Tools((TOOL,), "auto"), "auto", tokenizer.chat_template)
    assert parser is not None and parser.feed(plain["content"]).calls[0].name == "add"
