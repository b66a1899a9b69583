"""What the output must match, as requests say it."""

import json
from typing import Any

import pytest

from protocol.errors import InvalidRequest
from protocol.messages import Grammar
from protocol.openai.chat import parse_chat
from protocol.openai.completions import parse_completion
from protocol.openai.structured import GuidedDecoding

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
MESSAGES = [{"role": "user", "content": "x"}]


def guided(**fields: Any) -> GuidedDecoding | None:
    """Of both endpoints, which say the same."""
    parsed = parse_completion({"model": "m", "prompt": "x", **fields})
    chat = parse_chat({"model": "m", "messages": MESSAGES, **fields})
    assert parsed.guided == chat.guided
    grammar = parsed.guided.grammar if parsed.guided else None
    assert parsed.sampling(1).grammar == grammar == chat.sampling(1).grammar
    return parsed.guided


@pytest.mark.parametrize(
    ("fields", "field", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            "response_format.json_schema.schema",
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema",
            Grammar("json_object"),
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
            "structured_outputs.json",
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
        (
            {"structured_outputs": {"regex": "a+", "json_object": False}},
            "structured_outputs.regex",
            Grammar("regex", "a+"),
        ),
        (
            {"structured_outputs": {"choice": ["é", "b"]}},
            "structured_outputs.choice",
            Grammar("choice", '["é", "b"]'),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            Grammar("json_object"),
        ),
        ({"guided_json": SCHEMA}, "guided_json", Grammar("json_schema", json.dumps(SCHEMA))),
        ({"guided_grammar": "start: /a/"}, "guided_grammar", Grammar("grammar", "start: /a/")),
        ({"guided_choice": ["a"]}, "guided_choice", Grammar("choice", '["a"]')),
        ({"guided_regex": "a"}, "guided_regex", Grammar("regex", "a")),
    ],
)
def test_every_way_to_say_it(fields: dict[str, Any], field: str, grammar: Grammar) -> None:
    assert guided(**fields) == GuidedDecoding(grammar, field)


def test_saying_nothing_demands_nothing() -> None:
    assert guided() is None
    assert guided(response_format=None, structured_outputs=None) is None
    assert guided(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 1}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": "yes"},
                }
            },
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_a_mistake_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        guided(**fields)
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message
