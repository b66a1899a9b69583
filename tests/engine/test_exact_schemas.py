"""JSON schemas with numbers beyond float64. The reference is the library jsonschema."""

import json
import random
from decimal import Context, Decimal, localcontext
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from engine.text.grammar_compile import make_matcher, try_grammar
from protocol.messages import Grammar
from tests.engine.test_schema_numbers import _EDGES

BYTE_TOKENIZER = LLTokenizer("byte")
IDS = [1234567890123456789, 1175928847299117063]
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"minimum": 0, "maximum": 2**64 - 1}
FLOAT32 = {"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}
FLOAT64 = {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}


def grammar_of(schema: Any) -> Grammar:
    return Grammar(
        "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
    )


def matches(grammar: Grammar, text: str) -> bool:
    matcher = make_matcher(BYTE_TOKENIZER, grammar)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def draw_text(grammar: Grammar, rng: random.Random, limit: int = 400) -> str | None:
    """Return a random text that the masks allow; None if it became too long."""
    matcher = make_matcher(BYTE_TOKENIZER, grammar)
    drawn = bytearray()
    while not matcher.is_stopped() and len(drawn) < 4 * limit:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
        assert allowed and not matcher.is_error(), f"dead end after {drawn!r}"
        can_end = BYTE_TOKENIZER.eos_token in allowed
        allowed = [token for token in allowed if token < 256]
        if can_end and (not allowed or len(drawn) > limit or rng.random() < 0.4):
            break
        if len(drawn) > limit:
            allowed = [token for token in allowed if chr(token) in '"}],0:'] or allowed
        elif rng.random() < 0.9:
            allowed = [
                token for token in allowed if chr(token) not in " \n\r\t"
            ] or allowed
        token = rng.choice(allowed)
        drawn.append(token)
        assert matcher.consume_token(token)
    return drawn.decode() if matcher.is_accepting() else None


def parse_exactly(text: str) -> Any:
    """Return a JSON value with exact decimals, except for decimals with an exponent."""

    def as_number(digits: str) -> float | Decimal:
        return float(digits) if "e" in digits.lower() else Decimal(digits)

    return json.loads(text, parse_float=as_number)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "enum": IDS}, [*map(str, IDS)],
         ["1234567890123456768", "1"]),
        ({"const": IDS[0]}, ["1234567890123456789"], ["1234567890123456768"]),
        ({"const": {"a": [IDS[0], "x"]}}, ['{"a": [1234567890123456789, "x"]}',
         '{"a":[1234567890123456789,"x"]}'], ['{"a": [1234567890123456768, "x"]}']),
        ({"enum": [None, IDS[0], "a", 1, 1.5]},
         ["null", "1234567890123456789", '"a"', "1", "1.5"],
         ["1234567890123456788", "2"]),
        ({"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740995},
         ["9007199254740993", "9007199254740995"],
         ["9007199254740992", "9007199254740996"]),
        ({"type": "integer", "minimum": 2**63}, [str(2**63), str(10**30)],
         [str(2**63 - 1), "-1"]),
        ({"type": "integer", "minimum": 10**20}, [str(10**20)], [str(10**20 - 1)]),
        ({"type": "integer", "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 2},
         [str(2**53 + 1)], [str(2**53), str(2**53 + 2)]),
        ({"type": "integer", "maximum": 2**60, "exclusiveMaximum": True},
         [str(2**60 - 1)], [str(2**60)]),
        ({"minimum": 2**60}, [str(2**60), f"{2**60}.5", '"a"', "null", "[1]"],
         [str(2**60 - 1)]),
        ({"type": ["integer", "null"], "maximum": -(2**60)}, ["null", str(-(2**60))],
         ["-1", '"a"']),
        ({"type": "integer", "minimum": 2**60, "multipleOf": 100}, [str(10**20)],
         [str(10**20 + 1)]),
        ({"type": "number", **INT64}, ["1.5", str(2**63 - 1)],
         [f"{2**63 - 1}.5", str(2**63)]),
        ('{"const": 0.30000000000000004441}', ["0.30000000000000004441"],
         ["0.30000000000000004"]),
        ('{"type": "number", "minimum": 0.10000000000000000001, "maximum": 1}',
         ["0.10000000000000000001", "1.0"], ["0.1", "0.1000000000000000000"]),
        ({"allOf": [{"type": "integer", "minimum": 2**60}, {"maximum": 2**60 + 1}]},
         [str(2**60 + 1)], [str(2**60 + 2)]),
        ({"$ref": "#/$defs/id", "maximum": 2**60 + 1,
          "$defs": {"id": {"type": "integer", "minimum": 2**60}}}, [str(2**60)], ["1"]),
        ({"anyOf": [{"const": 2**60 + 1}, {"type": "string"}]}, [str(2**60 + 1), '"a"'],
         [str(2**60)]),
        ({"type": "array", "prefixItems": [{"const": 2**60 + 1}],
          "items": {"type": "null"}, "maxItems": 2},
         ["[]", f"[{2**60 + 1}]", f"[ {2**60 + 1} , null ]"],
         ["[null]", f"[{2**60 + 1},null,null]"]),
        ({"type": "object",
          "properties": {"a": {"const": 2**60 + 1}, "b": {"type": "null"}},
          "required": ["b"]},
         ['{"b":null}', f'{{"a": {2**60 + 1},\n "b":null , "c":[1]}}'],
         ["{}", f'{{"a":{2**60},"b":null}}', '{"b":null,"a":1}']),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)  # fmt: skip
def test_only_the_exact_numbers_match(schema, valid, invalid):
    assert try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake is None
    assert [text for text in valid if not matches(grammar_of(schema), text)] == []
    assert [text for text in invalid if matches(grammar_of(schema), text)] == []


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("bounds", [INT64, UINT64, FLOAT32, FLOAT64])
def test_bounds_of_machine_types_are_enforced(kind, bounds):
    schema = {
        "type": "object",
        "properties": {"x": {"type": kind, **bounds}},
        "required": ["x"],
    }
    assert try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake is None
    last = int(Decimal(repr(bounds["maximum"])))
    beyond = last * 10
    for number, expected in (
        (0, True),
        (last, True),
        (beyond, False),
        (-beyond, False),
    ):
        if kind == "integer" or abs(number) < 2**64:
            assert matches(grammar_of(schema), json.dumps({"x": number})) == expected


def _random_number(rng: random.Random) -> int:
    if rng.random() < 0.4:
        return rng.randint(-50, 50)
    return rng.choice((-1, 1)) * rng.choice([*_EDGES, *IDS]) + rng.randint(-3, 3)


def _random_scalar(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(4):
        case 0:
            values = [
                _random_number(rng),
                "x",
                None,
                {"a": _random_number(rng)},
                [1.5, 2**60 + 1],
            ]
            return {"enum": rng.sample(values, rng.randint(1, 4))}
        case 1:
            return {
                "const": rng.choice(
                    [_random_number(rng), {"a": {"b": _random_number(rng)}}]
                )
            }
        case 2:
            return rng.choice([{"type": "string", "maxLength": 3}, {"type": "null"}])
    kinds = ["integer", "number", ["integer", "null"], ["string", "number"]]
    schema: dict[str, Any] = {"type": rng.choice(kinds)}
    low, high = sorted((_random_number(rng), _random_number(rng)))
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low - 1
    if rng.random() < 0.7:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high + 1
    if rng.random() < 0.1:
        schema["multipleOf"] = 10
    return schema


def _random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    if depth == 3 or rng.random() < 0.3:
        return _random_scalar(rng)
    match rng.randrange(5):
        case 0:
            minimum = rng.randint(0, 2)
            schema = {
                "type": "array",
                "items": _random_schema(rng, depth + 1),
                "minItems": minimum,
            }
            if rng.random() < 0.5:
                prefix_items = [
                    _random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))
                ]
                schema["prefixItems"] = prefix_items
            return schema | (
                {"maxItems": minimum + rng.randint(0, 3)} if rng.random() < 0.7 else {}
            )
        case 1:
            options = [_random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
            return {"anyOf": options}
        case 2:
            return {"$ref": "#/$defs/shared"}
    names = rng.sample(["a", "b", "ab", 'é"', "id"], rng.randint(1, 4))
    schema = {
        "type": "object",
        "properties": {name: _random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.random() < 0.3
    return schema


@pytest.mark.parametrize("seed", range(6))
def test_texts_allowed_by_masks_validate(seed):
    """Random texts that the masks of random schemas allow are valid."""
    rng = random.Random(seed)
    num_drawn = 0
    for _ in range(40):
        schema = {**_random_schema(rng), "$defs": {"shared": _random_scalar(rng)}}
        if try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake is not None:
            continue
        for _ in range(2):
            if (text := draw_text(grammar_of(schema), rng)) is not None:
                with localcontext(Context(prec=2000)):
                    jsonschema.Draft202012Validator(schema).validate(
                        parse_exactly(text)
                    )
                num_drawn += 1
    assert num_drawn > 30


def test_calls_and_reasoning_around_exact_schemas():
    schema = {"type": "object", "properties": {"id": {"enum": IDS}}, "required": ["id"]}
    tools = [
        ["look_up", schema],
        ["f", {"type": "object", "additionalProperties": False}],
    ]
    for is_parallel in (True, False):
        calls = Grammar(
            "calls", json.dumps({"tools": tools, "is_parallel": is_parallel})
        )
        call = f'{{"name": "look_up", "parameters": {{"id": {IDS[0]}}}}}'
        assert matches(calls, f"[{call}]")
        two_calls = f'[{call}, {{"name": "f", "parameters": {{}}}}]'
        assert matches(calls, two_calls) is is_parallel
        assert not matches(calls, f"[{call.replace('789}', '768}')}]")
    thinking = Grammar("json_schema", json.dumps(schema), reasoning="open")
    assert matches(thinking, f'hm</think>\n{{"id": {IDS[1]}}}')
    assert not matches(thinking, f'hm</think>\n{{"id": {IDS[1] + 1}}}')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"const": 2**60}}, "minProperties": 1},
         "minProperties"),
        ({"properties": {"x": {"type": "integer", "multipleOf": 5_000_000_000}}},
         "properties.x.multipleOf"),
        ({"type": "integer", "maximum": 2**60, "multipleOf": 7}, "multipleOf"),
        ({"items": {"type": "integer", "maximum": int("9" * 500)}}, "items.maximum"),
        ({"multipleOf": 65537, "allOf": [{"multipleOf": 65539}]}, "multipleOf"),
    ],
)  # fmt: skip
def test_inexact_numbers_are_refused_by_path(schema, path):
    mistake = try_grammar(BYTE_TOKENIZER, grammar_of(schema)).mistake
    assert mistake is not None and f"{path}`" in mistake


def test_schemas_within_a_grammar_are_exact_or_refused():
    assert matches(Grammar("grammar", 'start: %json {"enum": [1, 2]}'), "2")
    assert matches(
        Grammar("grammar", 'start: %json {"type": "string", "format": "byte"}'), '"a"'
    )
    mistake = try_grammar(
        BYTE_TOKENIZER, Grammar("grammar", f'start: "a" %json {{"const": {IDS[0]}}}')
    ).mistake
    assert mistake is not None and "structured_outputs.json" in mistake
