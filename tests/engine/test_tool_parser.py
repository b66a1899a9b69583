"""Tool calls in an answer, however its text is cut into pieces."""

import random

import pytest

from engine.text.chat_template import ChatTemplate
from engine.text.tool_parser import ToolParser, create_tool_parser, tool_syntax
from protocol.openai.tools import ToolCallPiece, Tools, join_pieces

TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("add", "look_up"))


def new(kind: str) -> ToolParser:
    if kind in ("hermes", "llama3_json"):
        parser = create_tool_parser(Tools(TOOLS, "auto"), kind)
    else:
        parser = create_tool_parser(Tools(TOOLS, kind, "add"))  # type: ignore[arg-type]
    assert parser is not None
    return parser


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    content, found = "", list[ToolCallPiece]()
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        content += parsed.content
        found += parsed.calls
    calls = join_pieces(found)
    assert [call.index for call in calls] == list(range(parser.num_calls))
    assert all(call.id and call.id.startswith("call_") for call in calls)
    return content, [(call.name or "", call.arguments) for call in calls]


CASES = [
    ("hermes", "Just text < with <tags>.\n", "Just text < with <tags>.\n", []),
    (
        "hermes",
        'I will add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}\n'
        "</tool_call>",
        "I will add.",
        [("add", '{"a": 1, "b": [2, {"c": "}"}]}')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"add","arguments":{}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"s": "a\\"b \\\\"} , "name": "look_up"}\n</tool_call>\n',
        "",
        [("add", "{}"), ("look_up", '{"s": "a\\"b \\\\"}')],
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call> and more',
        " and more",
        [("add", '{"a": 1}')],
    ),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}', '<tool_call>{"x": 1}', []),
    ("hermes", "<tool_ca", "<tool_ca", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ', "", [("add", '{"a": ')]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "look_up", '
        '"parameters": {"s": "x;y"}}',
        "",
        [("add", '{"a": 1}'), ("look_up", '{"s": "x;y"}')],
    ),
    ("llama3_json", "No call at all.", "No call at all.", []),
    ("llama3_json", '{"name": "Anna", "age": 3}', '{"name": "Anna", "age": 3}', []),
    ("llama3_json", '{"city": {"name": "add"}} yes', '{"city": {"name": "add"}} yes', []),
    ("llama3_json", " [1] is a source", " [1] is a source", []),
    ("llama3_json", ' [{"a": 1}] is one', ' [{"a": 1}] is one', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("hermes", "See \n<tool_call> this", "See \n<tool_call> this", []),
    ("named", "", "", [("add", "")]),
    (
        "required",
        '[{"name": "add", "parameters": {"a":1}}, {"name": "other", "parameters": {}}]',
        "",
        [("add", '{"a":1}'), ("other", "{}")],
    ),
    ("required", '{"x": ], "name": "add"} yes', '{"x": ], "name": "add"} yes', []),
    ("named", '{"a": 1} ', "", [("add", '{"a": 1} ')]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_an_answer_is_read_the_same_however_it_is_cut(
    kind: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    rng = random.Random(len(text))
    cuts = [[text], list(text)]
    for _ in range(20):
        at = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        cuts.append([text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)])
    for pieces in cuts:
        assert read(new(kind), pieces) == (content, calls), pieces


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "required"])
@pytest.mark.parametrize("nested", ['{"name": "add", "arguments": %s}', '{"name": %s}', "{%s: 1}"])
def test_brackets_nested_without_end_are_text_like_any_other(kind: str, nested: str) -> None:
    deep = "[" * 20_000 + "]" * 20_000
    text = nested % deep
    begin = "<tool_call>" if kind == "hermes" else ""
    is_call = "arguments" in nested
    expected = ("", [("add", deep)]) if is_call else (begin + text, [])
    assert read(new(kind), [begin + text]) == expected


@pytest.mark.parametrize(
    ("kind", "begin"),
    [
        ("hermes", ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}'),
        ("llama3_json", ""),
    ],
)
def test_blanks_without_end_are_looked_at_once(kind: str, begin: str) -> None:
    """As many as here would take half an hour if each were looked at again with the next."""
    parser = new(kind)
    parser.feed(begin)
    given = [parser.feed(" ") for _ in range(400_000)]
    assert not any(parsed.content or parsed.calls for parsed in given)


def test_arguments_come_as_they_are_written() -> None:
    """The name first, then pieces of the arguments, not all at the end."""
    parser = new("hermes")
    parser.feed('<tool_call>{"name": "add", "argu')
    pieces = [parser.feed(text).calls for text in ('ments": {"a"', ": 1, ", '"b": 2}', "}</tool")]
    told = [[piece.arguments for piece in some] for some in pieces]
    assert told == [['{"a"'], [": 1, "], ['"b": 2}'], []]


@pytest.mark.parametrize(
    ("option", "template", "syntax"),
    [
        ("auto", "{{ tools }} <tool_call>", "hermes"),
        ("auto", '{{ tools }} {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("auto", "{{ tools }} <|python_tag|>", "llama3_json"),
        ("auto", "<|python_tag|> of a template that is told of no functions", "hermes"),
        ("auto", None, "hermes"),
        ("llama3_json", None, "llama3_json"),
        ("hermes", "{{ tools }} <|python_tag|>", "hermes"),
    ],
)
def test_the_syntax_is_the_option_s_or_the_template_s(
    option: str, template: str | None, syntax: str
) -> None:
    assert tool_syntax(option, ChatTemplate(template) if template else None) == syntax


def test_without_tools_there_are_no_calls() -> None:
    assert create_tool_parser(Tools()) is None
    assert create_tool_parser(Tools(TOOLS, "none")) is None
