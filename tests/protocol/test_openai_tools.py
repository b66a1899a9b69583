"""Tools of a chat request: which are offered, which must be called, and mistakes by name."""

import json
from typing import Any

import pytest

from protocol.errors import InvalidRequest
from protocol.openai.chat import parse_chat
from protocol.openai.tools import MAX_TOOLS, ToolCallPiece, Tools, whole_calls


def tool(name: str = "f", **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **members}}


NUMBER = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


def read(**fields: Any) -> Tools:
    messages = [{"role": "user", "content": "x"}]
    return parse_chat({"model": "m", "messages": messages, **fields}).toolset


def test_the_default_is_none_without_tools_and_auto_with_them() -> None:
    assert read().mode == "none" and not read(tools=[]).active
    assert read(tool_choice="auto").mode == "none"
    found = read(tools=[tool(description="d", parameters=None)])
    assert (found.mode, found.active, found.parallel) == ("auto", True, True)
    assert found.offered == (tool(description="d"),)
    assert found.guided is None


def test_none_hides_the_tools() -> None:
    assert not read(tools=[tool()], tool_choice="none").active


def test_a_named_tool_demands_its_arguments() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    found = read(tools=[tool(), tool("g", parameters=NUMBER)], tool_choice=choice)
    assert (found.mode, found.name) == ("named", "g")
    assert found.guided is not None
    assert found.guided.field == "tools[1].function.parameters"
    assert json.loads(found.guided.grammar.text) == NUMBER


def test_required_demands_a_list_of_calls() -> None:
    found = read(tools=[tool(parameters=NUMBER)], tool_choice="required")
    assert found.guided is not None and found.guided.grammar.kind == "grammar"
    assert "* " in found.guided.grammar.text
    one = read(tools=[tool(parameters=NUMBER)], tool_choice="required", parallel_tool_calls=False)
    assert one.guided is not None and "* " not in one.guided.grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool(str(i)) for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool(), {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict=1)]}, "tools[0].function.strict"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            {
                "tools": [tool()],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
    ],
)
def test_a_mistake_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_pieces_become_whole_calls() -> None:
    pieces = [
        ToolCallPiece(0, "", "call_a", "f"),
        ToolCallPiece(0, '{"x":'),
        ToolCallPiece(0, "1}"),
        ToolCallPiece(1, "{}", "call_b", "g"),
    ]
    assert pieces[0].delta() == {
        "index": 0,
        "id": "call_a",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert pieces[1].delta() == {"index": 0, "function": {"arguments": '{"x":'}}
    assert whole_calls(pieces) == [
        {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert pieces[0].arguments == ""
