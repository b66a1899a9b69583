"""A server that speculates gives the answers of a server that does not.

Both servers run the same model in float32. The comparison ignores ids, times,
`baton_kv`, and the counts of accepted and rejected proposals. Logprobs may differ by
0.001. All other parts of an answer must be equal.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import VARYING_FIELDS, by_choice
from tests.rigs.client import MODEL, TIMEOUT_S
from tests.rigs.cluster import Server, assert_idle, start_decode, started
from tests.rigs.plain_http import http

_TEXT = "Anna found a red ball. Ben found a red ball, too. Anna lost her red ball."
_LOGPROB = re.compile(r"-?\d+\.\d+(e-?\d+)?")
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "s",
        "schema": {
            "type": "object",
            "properties": {
                "names": {
                    "type": "array",
                    "items": {"enum": ["Anna", "Ben"]},
                    "maxItems": 4,
                }
            },
            "required": ["names"],
            "additionalProperties": False,
        },
    },
}
_COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    "several": {"temperature": 0.8, "seed": 4, "n": 3},
    "penalties": {
        "temperature": 0.5,
        "seed": 5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"40": 1.5},
        "ignore_eos": True,
    },
    "min_tokens": {"temperature": 0.9, "seed": 6, "min_tokens": 20},
    "stop": {"temperature": 0, "stop": ["ball", "Ben"], "ignore_eos": True},
    "stop shown": {
        "temperature": 0,
        "stop": ["e", "x"],
        "min_tokens": 12,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
    },
    "echo": {"temperature": 0, "echo": True, "logprobs": 2, "ignore_eos": True},
    "regex": {
        "temperature": 0,
        "structured_outputs": {"regex": "(Anna|Ben)( and (Anna|Ben)){5}"},
    },
}
_CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    "schema": {"temperature": 0.5, "seed": 8, "response_format": _SCHEMA},
    "tool": {"temperature": 0, "tools": [_TOOL], "tool_choice": "required"},
    "prediction": {
        "temperature": 0,
        "prediction": {"type": "content", "content": _TEXT},
    },
}


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[list[Server]]:
    decode = partial(start_decode, tiny_model)
    with started(decode, partial(decode, "--speculate", "ngram:8")) as both:
        yield both
        assert_idle(*both)


def _answer(server: Server, path: str, body: dict[str, Any]) -> tuple[str, list[float]]:
    """Return the text of an answer without its logprobs, and the logprobs."""
    response = http.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    text = by_choice(VARYING_FIELDS.sub("", response.text))
    return _LOGPROB.sub("", text), [float(n[0]) for n in _LOGPROB.finditer(text)]


def _assert_equal_answers(
    servers: list[Server], path: str, body: dict[str, Any]
) -> None:
    expected, expected_logprobs = _answer(servers[0], path, body)
    text, logprobs = _answer(servers[1], path, body)
    assert text == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True], ids=["one piece", "stream"])
@pytest.mark.parametrize("kind", _COMPLETIONS)
def test_completions_are_equal(servers, kind, stream):
    body = {
        "model": MODEL,
        "prompt": _TEXT,
        "max_tokens": 60,
        "return_token_ids": True,
        "stream": stream,
        **_COMPLETIONS[kind],
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    _assert_equal_answers(servers, "/v1/completions", body)


@pytest.mark.parametrize("stream", [False, True], ids=["one piece", "stream"])
@pytest.mark.parametrize("kind", _CHATS)
def test_chats_are_equal(servers, kind, stream):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": _TEXT}],
        "max_tokens": 60,
        "stream": stream,
        **_CHATS[kind],
    }
    _assert_equal_answers(servers, "/v1/chat/completions", body)


def test_proposals_are_accepted_and_counted(servers):
    """A greedy answer of the tiny model soon repeats itself, so the n-gram drafter's
    proposals are accepted.
    """
    server = servers[1]
    body = {"model": MODEL, "prompt": _TEXT, "max_tokens": 400, "temperature": 0}
    before = server.metrics()
    answer = http.post(
        f"{server.url}/v1/completions",
        json={**body, "ignore_eos": True},
        timeout=TIMEOUT_S,
    ).json()
    after = server.metrics()
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    for outcome, count in (
        (
            "proposed",
            sum(details[f"{x}_prediction_tokens"] for x in ("accepted", "rejected")),
        ),
        ("accepted", details["accepted_prediction_tokens"]),
    ):
        name = f'baton_speculative_{outcome}_tokens_total{{drafter="ngram"}}'
        assert after[name] - before[name] == count
