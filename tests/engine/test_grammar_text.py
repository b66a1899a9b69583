"""What can be compiled, and what is said of the rest."""

import json

import pytest
from llguidance import LLTokenizer

from engine.text.grammar_compile import MAX_GBNF_CHARS, MAX_GRAMMAR_CHARS, compiling_threads, judge
from protocol.messages import Grammar

BYTES = LLTokenizer("byte")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        Grammar("regex", r"\d{3}-[a-z]+"),
        Grammar("choice", json.dumps(["yes", 'say "no"\\', "", "é\n"])),
        Grammar("choice", json.dumps([chr(code) for code in (*range(0x300), 0x2028, 0x1F98A)])),
        Grammar("grammar", 'start: "a" rest\nrest: /[0-9]+/'),
        Grammar("grammar", 'root ::= "a" rest\nrest ::= [0-9]+'),
        Grammar("grammar", '\n // x ::= y\n\tstart : "::="' + " " * MAX_GBNF_CHARS),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_what_can_be_used(grammar: Grammar) -> None:
    assert judge(BYTES, grammar).mistake is None


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"$ref": "#/$defs/gone"}', "gone"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "not present"),
        ("json_schema", '{"enum": []}', "Unsatisfiable"),
        ("json_schema", '{"type": "string", "not": {"type": "string"}}', "not"),
        ("json_schema", "[" * 5000 + "]" * 5000, "recursion"),
        ("regex", "[a-z", "unclosed"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "", "empty"),
        ("regex", r"a?[^\s\S]", "no text"),
        ("choice", '[""]', "empty"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", "root ::= (", "line 1"),
        ("regex", "a" * (MAX_GRAMMAR_CHARS + 1), str(MAX_GRAMMAR_CHARS)),
        ("grammar", 'root ::= "' + "a" * MAX_GBNF_CHARS + '"', str(MAX_GBNF_CHARS)),
        ("grammar", "\n" * MAX_GRAMMAR_CHARS, str(MAX_GBNF_CHARS)),  # llguidance looks for minutes
    ],
)
def test_a_mistake_is_named_in_one_line(kind: str, text: str, said: str) -> None:
    mistake = judge(BYTES, Grammar(kind, text)).mistake  # type: ignore[arg-type]
    assert mistake is not None
    assert said in mistake and "\n" not in mistake and len(mistake) <= 300


def test_rules_in_a_long_row_do_not_end_the_process() -> None:
    """They overflow the stack of an ordinary thread, which no handler survives."""
    length = 4000
    rules = "\n".join(f'r{i}: r{i + 1} "x" | "y"' for i in range(length))
    lark = Grammar("grammar", f'start: r0\n{rules}\nr{length}: "z"')
    ends = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**ends, "d3000": {"type": "string"}}}
    with compiling_threads("test", 1) as pool:
        for grammar in (lark, Grammar("json_schema", json.dumps(schema))):
            assert len(grammar.text) <= MAX_GRAMMAR_CHARS
            assert pool.submit(judge, BYTES, grammar).result().mistake is None
