"""Structured outputs and tools through a prefill and a decode server."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.rigs.client import MODEL
from tests.rigs.cluster import cluster

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_MESSAGES: Any = [
    {"role": "user", "content": "Tell a story about Anna and the red ball."}
]
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Anna", "Ben"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 5},
            "maxItems": 2,
        },
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "age", "tags", "inner"],
    "additionalProperties": False,
    "$defs": {
        "inner": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
    },
}
_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "it", "schema": _SCHEMA, "strict": True},
}


def _client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120
    )


def _chat(client: openai.OpenAI, **members: Any) -> Any:
    """Return the only choice of an answer."""
    fields = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 500, **members}
    (choice,) = client.chat.completions.create(**fields).choices
    return choice


def _complete(client: openai.OpenAI, demand: dict[str, Any], **members: Any) -> Any:
    fields: Any = {"model": MODEL, "prompt": "Anna found", "max_tokens": 30, **members}
    extra = {"structured_outputs": demand, **fields.pop("extra", {})}
    return client.completions.create(**fields, extra_body=extra)


def test_answer_that_ends_with_stop_validates(client, tiny_cluster):
    """A tiny model generates random texts, so its answers vary as far as the schema
    allows.

    The answers of the cluster must equal those of the decode server alone.
    """

    def chat(number: int) -> tuple[str, str | None]:
        used_client = client if number < 2 else decode_client
        choice = _chat(used_client, response_format=_FORMAT, seed=number % 2)
        return choice.finish_reason, choice.message.content

    with (
        _client_of(tiny_cluster.decode[0].url) as decode_client,
        ThreadPoolExecutor(4) as pool,
    ):
        answers = list(pool.map(chat, range(4)))
    assert answers[:2] == answers[2:]
    assert sum(reason == "stop" for reason, _ in answers) >= 2
    for reason, content in answers:
        if reason == "stop":
            jsonschema.validate(json.loads(content or ""), _SCHEMA)


@pytest.mark.parametrize(
    ("demand", "matches"),
    [
        ({"regex": r"[a-c]{3}-\d\d"}, r"[a-c]{3}-\d\d"),
        ({"choice": ["red", "a blue one"]}, "red|a blue one"),
        ({"grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"choice": ["a"]}, "a"),
    ],
)
def test_completions_match(client, demand, matches):
    for seed in range(3):
        answer = _complete(client, demand, seed=seed)
        assert re.fullmatch(matches, answer.choices[0].text)
        assert answer.choices[0].finish_reason == "stop"


def test_integers_beyond_float64_are_exact(client, tiny_cluster):
    ids = [1234567890123456789, 1175928847299117063]
    schema = {
        "type": "object",
        "properties": {"id": {"type": "integer", "enum": ids}},
        "required": ["id"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    demands: list[dict[str, Any]] = [
        {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        {
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        },
    ]
    with _client_of(tiny_cluster.decode[0].url) as decode_client:
        for demand in demands:
            calls = [
                _chat(used_client, seed=seed, **demand).message.tool_calls
                for seed in range(2)
                for used_client in (client, decode_client)
            ]
            arguments = [json.loads(call.function.arguments) for (call,) in calls]
            assert all(one["id"] in ids for one in arguments)
            assert arguments[0] == arguments[1]
            assert arguments[2] == arguments[3]
    bounds = {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}
    answer = _complete(client, {"json": bounds})
    assert 2**53 + 1 <= int(answer.choices[0].text) <= 2**53 + 3


def test_every_choice_matches_the_grammar(client, tiny_cluster):
    demand = {"regex": "[a-z]{2,8}( [a-z]{2,8}){0,3}[.]"}
    with _client_of(tiny_cluster.decode[0].url) as decode_client:
        answers = [
            _complete(used_client, demand, n=4, seed=3)
            for used_client in (client, decode_client)
        ]
    both = [[(c.text, c.finish_reason) for c in answer.choices] for answer in answers]
    assert both[0] == both[1]
    assert len(set(both[0])) > 1
    for text, reason in both[0]:
        if reason == "stop":
            assert re.fullmatch(demand["regex"], text)


def test_penalties_bias_and_min_tokens_apply_within_the_grammar(client):
    shape = {"max_tokens": 40, "temperature": 0, "frequency_penalty": 2}
    answer = _complete(
        client, {"regex": "[ab]{1,40}"}, **shape, extra={"min_tokens": 12}
    )
    (choice,) = answer.choices
    assert re.fullmatch("[ab]{1,40}", choice.text) and {"a", "b"} <= set(choice.text)
    assert answer.usage is not None and answer.usage.completion_tokens >= 12


@pytest.mark.slow
def test_tensor_parallel_servers_give_the_same_answers(tiny_cluster, client):
    """Rank 0 computes the grammar's token masks and sends them to the other ranks."""
    options: Any = {
        "max_tokens": 80,
        "presence_penalty": 0.5,
        "response_format": _FORMAT,
    }
    two = ("--tp", "2")
    with (
        cluster(tiny_cluster.model, prefill_argv=two, decode_argv=two) as pair,
        _client_of(pair.url) as wide,
    ):
        for seed in range(3):
            answers = [
                _chat(used_client, **options, seed=seed)
                for used_client in (client, wide)
            ]
            assert answers[0].message.content == answers[1].message.content
