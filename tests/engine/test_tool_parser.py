"""The tool calls of an answer do not depend on the pieces in which the text arrives."""

import random
import re

import pytest

from engine.text.chat_template import ChatTemplate
from engine.text.tool_formats import tool_syntax
from engine.text.tool_parser import ToolParser, create_tool_parser
from protocol.openai.tools import ToolCallPiece, Tools, join_pieces

_TYPES = {"a": "integer", "s": "string", "deep": ["object", "null"], "ok": "boolean"}
PARAMETERS = {"properties": {name: {"type": kind} for name, kind in _TYPES.items()}}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("add", "look_up")
)


def new_parser(kind: str) -> ToolParser:
    if kind in ("required", "named"):
        parser = create_tool_parser(Tools(TOOLS, kind, "add"))  # type: ignore[arg-type]
    else:
        parser = create_tool_parser(Tools(TOOLS, "auto"), kind)
    assert parser is not None
    return parser


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    content = ""
    actual = list[ToolCallPiece]()
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        content += parsed.content
        actual += parsed.calls
    calls = join_pieces(actual)
    assert [call.index for call in calls] == list(range(parser.num_calls))
    assert all(
        call.id and re.fullmatch("call_[0-9a-f]{24}|[0-9a-f]{9}", call.id)
        for call in calls
    )
    return content, [(call.name or "", call.arguments) for call in calls]


UNCLOSED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}'
CASES = [
    ("hermes", "Just text < with <tags>.\n", "Just text < with <tags>.\n", []),
    ("hermes",
     'I will add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": '
     '"}"}]}}\n</tool_call>', "I will add.",
     [("add", '{"a": 1, "b": [2, {"c": "}"}]}')]),
    ("hermes",
     '<tool_call>{"name":"add","arguments":{}}</tool_call>\n<tool_call>\n'
     '{"arguments": {"s": "a\\"b \\\\"} , "name": "look_up"}\n</tool_call>\n', "",
     [("add", "{}"), ("look_up", '{"s": "a\\"b \\\\"}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes",
     '<tool_call>{"name": "add", "arguments": null}</tool_call><tool_call>{"name": '
     '"add", "arguments": ""}</tool_call>', "", [("add", "{}")] * 2),
    ("hermes",
     '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call> and more',
     " and more", [("add", '{"a": 1}')]),
    ("hermes", f'{UNCLOSED}</tool_call>\n{UNCLOSED}}}\n</tool_call> so', " so",
     [("add", '{"a": 1}')] * 2),
    ("hermes", f"{UNCLOSED}}}}}\n</tool_call>{UNCLOSED}, ", "",
     [("add", '{"a": 1}')] * 2),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>",
     []),
    ("hermes", '<tool_call>{"x": 1}', '<tool_call>{"x": 1}', []),
    ("hermes", "<tool_ca", "<tool_ca", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ', "",
     [("add", '{"a": ')]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "",
     [("add", '{"a": 1}')]),
    ("llama3_json",
     '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "look_up", '
     '"parameters": {"s": "x;y"}}', "",
     [("add", '{"a": 1}'), ("look_up", '{"s": "x;y"}')]),
    ("llama3_json", "No call at all.", "No call at all.", []),
    ("llama3_json", '{"name": "Anna", "age": 3}', '{"name": "Anna", "age": 3}', []),
    ("llama3_json", '{"city": {"name": "add"}} yes', '{"city": {"name": "add"}} yes',
     []),
    ("llama3_json", " [1] is a source", " [1] is a source", []),
    ("llama3_json", ' [{"a": 1}] is one', ' [{"a": 1}] is one', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("hermes", "See \n<tool_call> this", "See \n<tool_call> this", []),
    ("named", "", "", [("add", "")]),
    ("required",
     '[{"name": "add", "parameters": {"a":1}}, {"name": "other", "parameters": {}}]',
     "", [("add", '{"a":1}'), ("other", "{}")]),
    ("required", '{"x": ], "name": "add"} yes', '{"x": ], "name": "add"} yes', []),
    ("named", '{"a": 1} ', "", [("add", '{"a": 1} ')]),
    ("mistral", "Just [text] with [TOOL_", "Just [text] with [TOOL_", []),
    ("mistral",
     'Both: [TOOL_CALLS] [{"name": "add", "arguments": {"a": [1]}}, {"name": '
     '"look_up", "arguments": {"s": "]"}, "id": "123456789"}] ', "Both:",
     [("add", '{"a": [1]}'), ("look_up", '{"s": "]"}')]),
    ("mistral",
     '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]look_up[CALL_ID]abc123DEF[ARGS]{"s": '
     '"{"} so', " so", [("add", '{"a": 1}'), ("look_up", '{"s": "{"}')]),
    ("mistral", '[TOOL_CALLS]add{"a": ', "", [("add", '{"a": ')]),
    ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    ("mistral", "[TOOL_CALLS] [not JSON", "[TOOL_CALLS] [not JSON", []),
    ("mistral", "[TOOL_CALLS] what? {", "[TOOL_CALLS] what? {", []),
    ("mistral", f"[TOOL_CALLS]{'x' * 600}{{}}", f"[TOOL_CALLS]{'x' * 600}{{}}", []),
    ("deepseek_v3",
     "I look. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
     "```json\n"
     '{"a": "```"}\n```<｜tool▁call▁end｜>\n'
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{}\n"
     "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n", "I look.",
     [("add", '{"a": "```"}'), ("look_up", "{}")]),
    ("deepseek_v3",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
     '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"s": "<｜tool▁call▁end｜>"}', "",
     [("add", "{}"), ("look_up", '{"s": "<｜tool▁call▁end｜>"}')]),
    ("deepseek_v3",
     "So <｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n"
     "<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{}<｜tool▁call▁end｜> so",
     "So so", [("add", "{}"), ("look_up", "{}")]),
    ("deepseek_v3", "a <｜tool▁calls▁begin｜> b", "a <｜tool▁calls▁begin｜> b", []),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>? {}",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>? {}", []),
    ("qwen3_coder",
     "So: <tool_call>\n<function=look_up>\n<parameter=s>\n3\n</parameter>\n"
     '<parameter=a>\n3\n</parameter>\n<parameter=deep>\n{"x": ["</tool_call>"]}\n'
     "</parameter>\n<parameter=ok>True</parameter>\n</function>\n</tool_call>\n"
     "<tool_call>\n<function=add>\n</function></tool_call>", "So:",
     [("look_up", '{"s": "3", "a": 3, "deep": {"x": ["</tool_call>"]}, "ok": true}'),
      ("add", "{}")]),
    ("qwen3_coder",
     '<function=add><parameter=s>\n a "b"\n\n'
     "</parameter><parameter=new>[1e3]</parameter>"
     "<parameter=a>many</parameter></function> done", " done",
     [("add", '{"s": " a \\"b\\"\\n", "new": [1e3], "a": "many"}')]),
    ("qwen3_coder",
     "<tool_call><function=add><parameter=a>1</parameter><parameter=s>lo", "",
     [("add", '{"a": 1')]),
    ("qwen3_coder", "<tool_call> <function>", "<tool_call> <function>", []),
    ("qwen3_coder", "<function=a b> x", "<function=a b> x", []),
    ("glm45",
     "So: <tool_call>look_up\n<arg_key>s</arg_key>\n<arg_value> 3\n</arg_value>\n"
     "<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>deep</arg_key>\n"
     '<arg_value>{"x": ["</tool_call>"]}</arg_value>\n</tool_call>\n'
     "<tool_call>add</tool_call> done", "So: done",
     [("look_up", '{"s": " 3\\n", "a": 3, "deep": {"x": ["</tool_call>"]}}'),
      ("add", "{}")]),
    ("glm45",
     "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>s</arg_key>"
     "<arg", "", [("add", '{"a": 1')]),
    ("glm45", "<tool_call>a b<c", "<tool_call>a b<c", []),
    # Missing brackets.
    ("hermes",
     '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>\n'
     '<tool_call>{"name": "look_up", "arguments": {"s": "<"}}</tool_call> so', " so",
     [("add", '{"a": 1'), ("look_up", '{"s": "<"}')]),
    ("hermes",
     '<tool_call>{"name": "add"</tool_call>\n'
     '<tool_call>{"name": "look_up"}</tool_call>',
     '<tool_call>{"name": "add"</tool_call>', [("look_up", "{}")]),
    ("deepseek_v3",
     '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": [1<｜tool▁call▁end｜>\n'
     "<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "",
     [("add", '{"a": [1'), ("look_up", "{}")]),
    # Missing end tags.
    ("qwen3_coder",
     "<tool_call>\n<function=add>\n<parameter=s>\nDallas\n<parameter=a>\n1\n"
     "<parameter=ok>\ntrue\n</parameter>\n</function>\n</tool_call>", "",
     [("add", '{"s": "Dallas", "a": 1, "ok": true}')]),
    ("qwen3_coder",
     "<function=add><parameter=s>x <parameter=a>1</parameter></function> so", " so",
     [("add", '{"s": "x ", "a": 1}')]),
    ("qwen3_coder",
     "<function=add>\n<parameter=s>\nx\n<parameter=new>\ny\n</parameter>\n</function>",
     "", [("add", '{"s": "x", "new": "y"}')]),
    ("qwen3_coder",
     "<tool_call><function=add><parameter=s>x</function></tool_call>\n"
     "<tool_call><function=look_up><parameter=s>\ny\n</function>\n</tool_call>", "",
     [("add", '{"s": "x"}'), ("look_up", '{"s": "y"}')]),
    ("qwen3_coder", "<tool_call><function=add><parameter=s>x\n</tool_call>\n<tool_call>"
     "<function=look_up><parameter=s>y</tool_call>\nso", "\nso",
     [("add", '{"s": "x"}'), ("look_up", '{"s": "y"}')]),
    ("qwen3_coder",
     "<function=add><parameter=a\n1\n</parameter><parameter=s>x</parameter></function>",
     "", [("add", '{"a": 1, "s": "x"}')]),
    ("glm45",
     "<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>x\n<arg_key>a</arg_key>\n"
     "<arg_value>1</arg_value>\n</tool_call>", "", [("add", '{"s": "x", "a": 1}')]),
    ("glm45",
     "<tool_call>add<arg_key>s\n<arg_value>x</arg_value><arg_key>a</arg_key>"
     "<arg_value>1</arg_value></tool_call>", "", [("add", '{"s": "x", "a": 1}')]),
    ("glm45",
     "<tool_call>add<arg_key>s</arg_key><arg_value>x\n</tool_call>\n"
     "<tool_call>look_up<arg_key>a</arg_key>2</tool_call> so", " so",
     [("add", '{"s": "x"}'), ("look_up", '{"a": 2}')]),
    # Tags within a value are text. Only the value's end tag ends the value.
    ("qwen3_coder",
     "<function=add><parameter=s>a <parameter=s> <parameter=x> <b></function> "
     "c</parameter></function>", "",
     [("add", '{"s": "a <parameter=s> <parameter=x> <b></function> c"}')]),
    ("glm45",
     "<tool_call>add<arg_key>s</arg_key><arg_value><arg_key>x</arg_key></tool_call> "
     "c</arg_value></tool_call>", "",
     [("add", '{"s": "<arg_key>x</arg_key></tool_call> c"}')]),
    ("pythonic",
     "[add(a=1, deep={'x': [True, None, (1.5,)]}), look_up(s=\"it's ) ]\"),add()]\n",
     "",
     [("add", '{"a": 1, "deep": {"x": [true, null, [1.5]]}}'),
      ("look_up", '{"s": "it\'s ) ]"}'), ("add", "{}")]),
    ("pythonic", "<|python_start|>[add(a=-1)]<|python_end|>", "",
     [("add", '{"a": -1}')]),
    ("pythonic", '[add(ok=true, deep={"x": null, "true": [false]})]', "",
     [("add", '{"ok": true, "deep": {"x": null, "true": [false]}}')]),
    ("pythonic", "[add(a=1), nobody(b=2)] so", ", nobody(b=2)] so",
     [("add", '{"a": 1}')]),
    ("pythonic", "[add(1)]", "[add(1)]", []),
    ("pythonic", "[add(**{'a': 1})]", "[add(**{'a': 1})]", []),
    ("pythonic", "[add(a=look_up())]", "[add(a=look_up())]", []),
    ("pythonic", "[add(a=1e999)]", "[add(a=1e999)]", []),
    ("pythonic", r"[add(a='\ud800')]", r"[add(a='\ud800')]", []),
    ("pythonic", "[add(a=", "[add(a=", []),
    ("pythonic", "[1] is a source (of many)", "[1] is a source (of many)", []),
    ("pythonic", "No call.", "No call.", []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_answer_is_read_the_same_in_any_pieces(kind, text, content, calls):
    rng = random.Random(len(text))
    cuts = [[text], list(text)]
    cuts += [[text[:i], text[i:]] for i in range(len(text))]
    for _ in range(20):
        borders = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        starts = [0, *borders]
        ends = [*borders, len(text)]
        cuts.append([text[i:j] for i, j in zip(starts, ends, strict=True)])
    for pieces in cuts:
        assert read(new_parser(kind), pieces) == (content, calls), pieces


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "required"])
@pytest.mark.parametrize(
    "nested", ['{"name": "add", "arguments": %s}', '{"name": %s}', "{%s: 1}"]
)
def test_deeply_nested_brackets_are_plain_text(kind, nested):
    deep = "[" * 20_000 + "]" * 20_000
    text = nested % deep
    begin = "<tool_call>" if kind == "hermes" else ""
    is_call = "arguments" in nested
    expected = ("", [("add", deep)]) if is_call else (begin + text, [])
    assert read(new_parser(kind), [begin + text]) == expected


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "begin", "end", "size"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"s": "', '"}}', 40_009),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"s": "', '"}', 40_009),
        ("deepseek_v3",
         '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"s": "', '"}',
         40_009),
        ("qwen3_coder", "<function=add><parameter=s>", "</parameter></function>",
         40_009),
        ("glm45", "<tool_call>add<arg_key>s</arg_key><arg_value>",
         "</arg_value></tool_call>", 40_009),
        ("pythonic", '[add(s="', '")]', 40_009),
        ("llama3_json", '{"name": "add", "parameters": {"s": "', '"}}', 40_009),
    ],
)  # fmt: skip
def test_long_argument_in_single_characters_is_scanned_once(kind, begin, end, size):
    """The test takes a second. If the text were scanned again for each character, it
    would take half an hour.
    """
    content, ((name, arguments),) = read(
        new_parser(kind), [begin, *("x" * 40_000), end]
    )
    assert (content, name, len(arguments)) == ("", "add", size)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "begin"),
    [
        ("hermes", ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}'),
        ("llama3_json", ""),
        ("mistral", "[TOOL_CALLS] "),
        ("qwen3_coder", "<tool_call><function=add>"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key>"),
        ("pythonic", "[add()]"),
    ],
)
def test_endless_blanks_are_scanned_once(kind, begin):
    """The test would take two minutes if spaces were scanned more than once."""
    parser = new_parser(kind)
    parser.feed(begin)
    results = [parser.feed(" ") for _ in range(100_000)][1:]
    assert not any(parsed.content or parsed.calls for parsed in results)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["<", "</ ", "<parameter=", "</function> "])
@pytest.mark.parametrize("is_whole", [False, True])
def test_value_with_many_tags_is_scanned_once(piece, is_whole):
    text = piece * 6_000
    pieces = [text] if is_whole else [*text]
    content, ((_, arguments),) = read(
        new_parser("qwen3_coder"),
        ["<function=add><parameter=s>", *pieces, "</parameter></function>"],
    )
    assert content == "" and len(arguments) == len(text) + len('{"s": ""}')


def test_arguments_are_streamed_as_written():
    """The first piece has only the name. The arguments follow while they arrive."""
    parser = new_parser("hermes")
    parser.feed('<tool_call>{"name": "add", "argu')
    pieces = [
        parser.feed(text).calls
        for text in ('ments": {"a"', ": 1, ", '"b": 2}', "}</tool")
    ]
    streamed_arguments = [[piece.arguments for piece in calls] for calls in pieces]
    assert streamed_arguments == [["", '{"a"'], [": 1, "], ['"b": 2}'], []]


@pytest.mark.parametrize(
    ("option", "template", "syntax"),
    [
        ("auto", "{{ tools }} <tool_call>", "hermes"),
        (
            "auto",
            '{{ tools }} {"name": function name, "parameters": dictionary}',
            "llama3_json",
        ),
        ("auto", "{{ tools }} <|python_tag|>", "llama3_json"),
        ("auto", "<|python_tag|> of a template that writes no functions", "hermes"),
        ("auto", None, "hermes"),
        ("auto", "{{ tools }} [AVAILABLE_TOOLS] ... [TOOL_CALLS]", "mistral"),
        (
            "auto",
            "{{ tools }} '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' ",
            "deepseek_v3",
        ),
        ("auto", "{{ tools }} <tool_call>\n<function=example_name>", "qwen3_coder"),
        (
            "auto",
            "{{ tools }} <tool_call>{function-name}\n<arg_key>{arg-key-1}",
            "glm45",
        ),
        (
            "auto",
            '{{ tools }} "parameters": [func_name1(param1=value1), ...]',
            "pythonic",
        ),
        ("llama3_json", None, "llama3_json"),
        ("hermes", "{{ tools }} <|python_tag|>", "hermes"),
    ],
)
def test_syntax_comes_from_the_option_or_the_template(option, template, syntax):
    assert tool_syntax(option, ChatTemplate(template) if template else None) == syntax


@pytest.mark.parametrize(
    "schema", [{"anyOf": 5}, {"oneOf": "x"}, {"type": 5}, {"anyOf": [5]}, 5]
)
def test_malformed_schema_does_not_restrict_a_parameter(schema):
    function = {"name": "add", "parameters": {"properties": {"a": schema}}}
    tools = Tools(({"type": "function", "function": function},), "auto")
    parser = create_tool_parser(tools, "qwen3_coder")
    assert parser is not None
    call = (
        "<tool_call><function=add><parameter=a>[1]</parameter></function></tool_call>"
    )
    assert read(parser, [call]) == ("", [("add", '{"a": [1]}')])


def test_without_tools_there_are_no_calls():
    assert create_tool_parser(Tools()) is None
    assert create_tool_parser(Tools(TOOLS, "none")) is None
