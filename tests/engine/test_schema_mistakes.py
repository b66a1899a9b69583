"""Mistakes in schemas and grammars are reported with path, value and fix."""

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLTokenizer

from engine.text.grammar_compile import try_grammar
from engine.text.schema.keywords import FORMATS
from protocol.messages import Grammar
from tests.engine.test_exact_schemas import BYTE_TOKENIZER, grammar_of, matches

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
REFS = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
DEFS = {"cat": CAT, "dog": DOG}

# Words of the grammar library and its code. No error for a client may contain them.
LIBRARY = re.compile(
    r"coerce_one_of|llguidance|lenient|x-guidance|whitespace_|separator|json_allow|f64|"
    r"u64|i64|"
    r"usize|Some\(|None|Unimplemented|Unsatisfiable|Expected|panic|assert|lexer|"
    r"NoExtension|"
    r"RegexAst|SearchRegex|verbose|retriev|registry|json-schema:|rx_|backtrace|"
    r"lookarounds"
)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [CAT, DOG]},
        {"oneOf": REFS, "$defs": DEFS},
        {"oneOf": REFS, "discriminator": {"propertyName": "kind"}, "$defs": DEFS},
        {"oneOf": [{"allOf": [REFS[0]]}, {"$ref": "#/$defs/alias"}],
         "$defs": {**DEFS, "alias": REFS[1]}},
        {"type": "object", "oneOf": REFS, "$defs": DEFS},
        {"$ref": "#/$defs/pet", "$defs": {**DEFS, "pet": {"oneOf": REFS}}},
        {"oneOf": REFS, "anyOf": [{"type": "object"}], "$defs": DEFS},
        {"oneOf": REFS, "allOf": [{"type": "object"}], "$defs": DEFS},
    ],
)  # fmt: skip
def test_one_of_is_the_same_in_any_spelling(schema):
    assert try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake is None
    assert matches(grammar_of(schema), '{"kind":"dog"}') and not matches(
        grammar_of(schema), '{"kind":"cow"}'
    )


@pytest.mark.parametrize(
    ("options", "is_enforced"),
    [
        ([{"const": 1}, {"const": 2}], True),
        ([{"enum": ["a", "b"]}, {"enum": ["c"]}], True),
        ([{"type": "integer"}, {"type": "string"}, {"type": "null"}], True),
        ([{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}],
         True),
        ([{"type": "integer", "maximum": 2**60},
          {"type": "integer", "minimum": 2**60 + 1}], True),
        ([{"type": "array"}, CAT], True),
        ([{**CAT, "additionalProperties": False},
          {"type": "object", "required": ["other"]}], True),
        ([{"anyOf": [CAT, {"type": "null"}]}, DOG], True),
        ([CAT], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}],
         False),
        ([{"required": ["a"]}, {"required": ["b"]}], False),
        ([CAT, {"type": "object"}], False),
        ([{"properties": {"kind": {"const": "cat"}}},
          {"properties": {"kind": {"const": "x"}}}], False),
        ([True, {"type": "string"}], False),
    ],
)  # fmt: skip
def test_one_of_is_enforced_where_options_exclude_each_other(options, is_enforced):
    mistake = try_grammar(
        BYTE_TOKENIZER, grammar_of({"properties": {"a": {"oneOf": options}}})
    ).mistake
    if is_enforced:
        assert mistake is None
    else:
        assert (
            mistake is not None
            and "`properties.a.oneOf` has options 0 and 1" in mistake
        )


def test_sibling_keywords_of_one_of_may_leave_one_option():
    schema = {
        "type": "string",
        "oneOf": [{"type": ["string", "null"]}, {"type": ["null"]}],
    }
    assert try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake is None
    assert matches(grammar_of(schema), '"a"') and not matches(
        grammar_of(schema), "null"
    )


@pytest.mark.parametrize(
    "name", ["uri-reference", "password", "byte", "int64", "unknown", "x"]
)
def test_unknown_formats_are_annotations(name):
    grammar = grammar_of(
        {"type": "object", "properties": {"a": {"format": name}}, "required": ["a"]}
    )
    assert try_grammar(BYTE_TOKENIZER, grammar).mistake is None
    assert matches(grammar, '{"a": "any text"}') and matches(grammar, '{"a": 1}')


def test_supported_formats_are_enforced():
    for name in FORMATS:
        assert not matches(
            grammar_of({"type": "string", "format": name}), '"any text"'
        ), name


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "minLength": 1.0}, '"a"', '""'),
        ({"type": "array", "uniqueItems": False}, "[1, 1]", "1"),
        ({"type": "array", "maxItems": 2**31 - 1}, "[1, 1]", "1"),
        ({"type": "string", "maxLength": 2**53 - 1}, '"a"', "1"),
        ({"type": "number", "multipleOf": 0.07}, "0.14", "0.15"),
        ({"type": "integer", "not": False, "then": {"minimum": 3}}, "2", '"a"'),
        ({"$schema": "https://example.com/dialect", "type": "integer"}, "1", '"a"'),
        ({"$ref": "#int", "$defs": {"x": {"$anchor": "int", "type": "integer"}}}, "1",
         '"a"'),
        ({"$id": "http://x/a", "$ref": "http://x/b",
          "$defs": {"x": {"$id": "b", "$ref": "#/$defs/y",
                          "$defs": {"y": {"type": "integer"}}}}}, "1", '"a"'),
        ({"x-guidance": {"lenient": True, "foo": 1}, "type": "integer"}, "1", '"a"'),
        ('{"type": "integer", "default": 1e400, "examples": [1e-400]}', "1", '"a"'),
    ],
)  # fmt: skip
def test_keywords_without_effect_are_not_refused(schema, valid, invalid):
    assert try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake is None
    assert matches(grammar_of(schema), valid) and not matches(
        grammar_of(schema), invalid
    )


@pytest.mark.parametrize(
    ("schema", "path", "text"),
    [
        ({"properties": {"a": {"type": "objekt"}}}, "properties.a.type",
         '"objekt" (did you mean'),
        ({"properties": {"a": 3}}, "properties.a",
         "3; it must be an object or a boolean"),
        ({"items": [{"minimum": "3"}]}, "items[0].minimum", '"3"; it must be a number'),
        ({"anyOf": [{"minLength": -1}]}, "anyOf[0].minLength",
         "an integer of at least 0"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": []}}}, "$defs.a.enum",
         "at least one"),
        ({"allOf": [{"not": {"type": "null"}}]}, "allOf[0].not", "cannot be enforced"),
        ({"if": {"type": "null"}, "then": True}, "if", "cannot be enforced"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "cannot be enforced"),
        ({"x-guidance": {"lenient": True}, "not": {"type": "null"}}, "not",
         "cannot be enforced"),
        ({"$ref": "other.json"}, "$ref", "not present"),
        ({"$ref": 3}, "$ref", "must be a string"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "$ref",
         "back to itself"),
        ({"multipleOf": 0}, "multipleOf", "greater than 0"),
        ({"minLength": 10**30}, "minLength", "must be below"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "properties.a",
         "look-ahead"),
        ({"properties": {"a": {"type": "string", "pattern": "a("}}}, "properties.a",
         "unclosed group"),
        ({"items": {"type": "object", "patternProperties": {"^a": {}, "b$": {}}}},
         "items", "exclude each other"),
        ({"type": "object",
          "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}},
          "required": ["a"]}, "properties.a", "no value matches"),
        ({"properties": {"a": {"type": "integer", "minimum": 2**60, "maximum": 2},
                         "b": {"type": "string", "pattern": "(?=a)"}}}, "properties.b",
         "look-ahead"),
    ],
)  # fmt: skip
def test_mistake_is_named_by_its_path(schema, path, text):
    mistake = try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake
    assert mistake is not None and mistake.startswith(f"`{path}`") and text in mistake
    assert not LIBRARY.search(mistake)


_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 1.5, 10**30, "a", "(", "#/x", [], {}, ["a"], [1], [{}],
    {"a": 1}, {"a": {}}, [{"type": "integer"}, {"type": "string"}], [3, "x"], "integer",
    ["integer", "null"],
]  # fmt: skip
_KEYWORDS = (
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "$id", "$schema",
    "$anchor", "$defs", "properties", "required", "additionalProperties",
    "patternProperties", "items", "prefixItems", "additionalItems", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties",
    "maxProperties", "uniqueItems", "contains", "if", "then", "dependencies",
    "propertyNames", "x-guidance", "unevaluatedProperties", "title", "default",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_library_messages_never_reach_a_client(seed):
    """Most of the random schemas have mistakes."""
    rng = random.Random(seed)
    num_mistakes = 0
    for _ in range(250):
        schema: dict[str, Any] = {}
        for keyword in rng.sample(_KEYWORDS, rng.randint(1, 4)):
            schema[keyword] = rng.choice(_VALUES)
        if rng.random() < 0.4:
            schema = {
                "type": "object",
                "properties": {"it": schema},
                "required": ["it"],
            }
        mistake = try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake
        if mistake is not None:
            num_mistakes += 1
            assert not LIBRARY.search(mistake.replace("null", "")), (schema, mistake)
    assert num_mistakes > 100


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        ("regex", r"\bfoo", "word boundary"),
        ("regex", r"(a)\1", "backreference"),
        ("regex", "a{2,1}", "not valid (invalid repetition count range"),
        ("regex", "a^b", "within an expression"),
        ("grammar", "start: A\nA: A", "`A` refers to itself"),
        ("grammar", 'start: "a"\nstart: "b"', "`start` is defined twice"),
        ("grammar", "start: (", "syntax error in line 1"),
        ("grammar", "start: <foo>", "no special token"),
        ("grammar", "start: @foo", "a grammar that it does not contain"),
        ("grammar", 'start: "a"\nx: %json {', "`%json` in line 2 is not JSON"),
        ("grammar", 'start: %json {"oneOf": [{}, {}]}', "`oneOf` has options 0 and 1"),
        (
            "grammar",
            "start: %json " + json.dumps({"x-guidance": {"foo": 1}, "type": 3}),
            "`type`",
        ),
        ("grammar", 'start: "z".."a"', "wrong order"),
        ("grammar", "start: %regex {}", ""),
        ("grammar", "start[stop=/a/]: /b/", ""),
        ("grammar", 'root ::= "a', "syntax error in line 1"),
        ("grammar", 'foo ::= "a"', "no rule `root`"),
        ("grammar", "root ::= gone", "`gone` is not defined"),
    ],
)
def test_mistakes_in_grammars_are_reworded(kind, text, output):
    mistake = try_grammar(LLTokenizer("byte"), Grammar(kind, text)).mistake
    assert mistake is not None and output in mistake
    assert not LIBRARY.search(mistake)
