"""A prefill and a decode server with messages in harmony, the format of gpt-oss."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.rigs.client import answer_of, post, sse_events
from tests.rigs.cluster import Cluster, assert_idle, cluster

_TAGS = [
    f"<|{tag}|>" for tag in "return call constrain channel start end message".split()
]
_TEMPLATE = (
    "<|start|>user<|message|>{{ messages[0].content }}<|end|>"
    "<|start|>assistant{# <|channel|> #}"
)
_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": _PARAMETERS}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": _PARAMETERS}}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with harmony's tags in place of the last tokens of its
    vocabulary.
    """
    folder = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(tiny_model, folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    merges = data["model"]["merges"]
    last = sorted(vocab, key=vocab.get)[-len(_TAGS) :]
    data["model"]["merges"] = [m for m in merges if "".join(m) not in last]
    for piece, tag in zip(last, _TAGS, strict=True):
        vocab[tag] = vocab.pop(piece)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        data["added_tokens"].append(
            {"id": vocab[tag], "content": tag, "special": True, **flags}
        )
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": _TEMPLATE})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [505, 506]})
    )
    return folder


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[Cluster]:
    with cluster(model) as running:
        yield running
        assert_idle(*running.servers()[1:], timeout_s=45)


def _parts(message: dict[str, Any]) -> list[str]:
    """Return the reasoning, the content and the arguments of all tool calls."""
    calls = (call["function"] for call in message.get("tool_calls", ()))
    arguments = "".join(call["arguments"] for call in calls)
    return [
        message.get("reasoning_content", ""),
        message.get("content") or "",
        arguments,
    ]


@pytest.mark.parametrize(
    ("likely", "fields", "finish_reason"),
    [
        ("final", {"response_format": _FORMAT}, "stop"),
        ("final", {"tool_choice": "required"}, "tool_calls"),
        ("analysis", {"response_format": _FORMAT}, "length"),
        (" to=functions.add<|call|>", {"response_format": _FORMAT}, "tool_calls"),
    ],
)
def test_grammar_makes_the_model_write_messages(
    servers, model, likely, fields, finish_reason
):
    """The first token, which the prefill server draws, is a part of the head of a
    message.
    """
    if finish_reason == "tool_calls":
        fields = {**fields, "tools": [_TOOL]}
    favoured = Tokenizer(model).encode(f"{likely}<|message|>", add_special_tokens=False)
    bias = {str(favoured[0]): 60, **dict.fromkeys(map(str, favoured[-2:]), 60)}
    request: dict[str, Any] = {
        "path": "/v1/chat/completions",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": bias,
        "parallel_tool_calls": False,
        **fields,
    }
    answer = answer_of(servers.url, **request)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == finish_reason
    parts = _parts(choice["message"])
    decode_only = answer_of(servers.decode[0].url, **request)
    assert _parts(decode_only["choices"][0]["message"]) == parts
    streamed = post(servers.url, stream=True, **request)
    events = [text for _, text in sse_events(streamed.text)][:-1]
    deltas = [_parts(json.loads(text)["choices"][0]["delta"]) for text in events]
    assert ["".join(column) for column in zip(*deltas, strict=True)] == parts
    reasoning, content, arguments = parts
    assert bool(reasoning) == (likely == "analysis")
    if finish_reason != "length":
        assert json.loads(content or arguments) in ({}, {"a": 1}, {"a": 2})
