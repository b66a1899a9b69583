"""The proxy with Anthropic's Python client."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.rigs.agents import agent_request
from tests.rigs.client import MODEL
from tests.rigs.cluster import Cluster
from tests.rigs.plain_http import http

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_SYSTEM = "You tell stories."
_QUESTION = "Tell a story about Anna and the red ball."
_CHAT = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _QUESTION}]
_REQUEST: Any = {
    "model": MODEL,
    "system": _SYSTEM,
    "messages": [{"role": "user", "content": _QUESTION}],
    "max_tokens": 60,
    "extra_body": {"temperature": 0},  # the client has no argument for it
}
_TOOL: Any = {
    "name": "find_toy",
    "description": "Finds a toy.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def agent_client(tiny_cluster: Cluster) -> Iterator[Any]:
    # At the top of the file, the import would take 2 s in every process that collects
    # the tests.
    global anthropic
    import anthropic

    with anthropic.Anthropic(
        base_url=tiny_cluster.url, api_key="unused", max_retries=0, timeout=120
    ) as client:
        yield client


def _prompt_tokens(usage: Any) -> int:
    cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return int(usage.input_tokens + cached)


def test_message_is_disaggregated_and_has_the_chats_text(
    agent_client, client, tiny_cluster, tiny_reference
):
    moved = 'baton_kv_tokens_total{source="transferred"}'
    before = tiny_cluster.decode[0].metrics().get(moved, 0.0)
    answer = agent_client.messages.create(**_REQUEST)
    assert tiny_cluster.decode[0].metrics()[moved] > before
    ids, text = tiny_reference.answer(_CHAT, 60)
    assert answer.content[0].text == text
    assert answer.usage.output_tokens == len(ids)
    chat = client.chat.completions.create(
        model=MODEL, messages=_CHAT, max_tokens=60, temperature=0
    )
    assert _prompt_tokens(answer.usage) == chat.usage.prompt_tokens
    is_cut = chat.choices[0].finish_reason == "length"
    assert answer.stop_reason == ("max_tokens" if is_cut else "end_turn")


def test_limit_may_exceed_the_context(agent_client, tiny_reference):
    """Agents send token limits that suit models with longer contexts. Such a limit is
    accepted, and the answer ends before it.
    """
    ids, text = tiny_reference.answer(_CHAT, 60)
    assert len(ids) < 60
    answer = agent_client.messages.create(**{**_REQUEST, "max_tokens": 32_000})
    assert (answer.content[0].text, answer.stop_reason) == (text, "end_turn")


def test_streaming_helper_reads_the_same_message(agent_client, tiny_reference):
    _, text = tiny_reference.answer(_CHAT, 60)
    request = {**_REQUEST, "stop_sequences": ["."]}
    with agent_client.messages.stream(**request) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    complete = agent_client.messages.create(**request)
    assert "".join(texts) == text[: text.index(".")] and len(texts) > 3
    assert streamed.content[0].text == complete.content[0].text
    assert streamed.stop_reason == complete.stop_reason == "stop_sequence"
    assert streamed.stop_sequence == complete.stop_sequence == "."
    assert streamed.usage.output_tokens == complete.usage.output_tokens
    assert _prompt_tokens(streamed.usage) == _prompt_tokens(complete.usage)


def test_assistants_last_message_is_continued(agent_client, tiny_reference):
    _, text = tiny_reference.answer(_CHAT, 60)
    middle = text.index(" ", 20)  # a token begins there
    begin, rest = text[:middle], text[middle:]
    turn = {"role": "assistant", "content": begin}
    messages = [*_REQUEST["messages"], turn]
    answer = agent_client.messages.create(**{**_REQUEST, "messages": messages})
    # The limit of 60 tokens now applies to the continuation alone, so the complete
    # message may be longer.
    assert answer.content[0].text.startswith(rest)


def test_limit_of_zero_tokens_caches_the_prompt_for_the_next_request(agent_client):
    block = {
        "type": "text",
        "text": "The red ball rolls to the green box. " * 20,
        "cache_control": {"type": "ephemeral"},
    }
    request = {**_REQUEST, "system": [block]}
    warmed = agent_client.messages.create(**{**request, "max_tokens": 0})
    assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
    assert warmed.usage.output_tokens == 0
    num_created = warmed.usage.cache_creation_input_tokens
    assert num_created > 100 and num_created > warmed.usage.cache_read_input_tokens
    answer = agent_client.messages.create(**{**request, "max_tokens": 5})
    # At most the last block is not read from the cache, because the last token of a
    # prompt must be computed again.
    assert answer.usage.cache_read_input_tokens > _prompt_tokens(warmed.usage) - 64


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_calls_functions(agent_client, stream):
    colours = []

    @anthropic.beta_tool
    def paint(colour: Literal["red", "green"]) -> str:
        """Paints the ball.

        Args:
            colour: the new colour.
        """
        colours.append(colour)
        raise ValueError("no paint left")

    runner = agent_client.beta.messages.tool_runner(
        **{**_REQUEST, "max_tokens": 200},
        tools=[paint],
        # Without a forced call, the tiny model would generate text without an end.
        tool_choice={"type": "tool", "name": "paint"},
        max_iterations=2,
        stream=stream,
    )
    messages = []
    for item in runner:
        messages.append(item.get_final_message() if stream else item)
    assert [message.content[0].type for message in messages] == ["tool_use"] * 2
    assert messages[0].stop_reason == "tool_use"
    assert colours[0] == messages[0].content[0].input["colour"]
    # The error of the function is part of the second prompt.
    first, second = (_prompt_tokens(message.usage) for message in messages)
    assert second > first


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"tools": [_TOOL]},
        {"tools": [_TOOL], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    ],
)
def test_counted_tokens_are_those_of_the_request(agent_client, members):
    request = {**_REQUEST, **members, "max_tokens": 2}
    usage = agent_client.messages.create(**request).usage
    del request["max_tokens"], request["extra_body"]
    counted = agent_client.messages.count_tokens(**request)
    assert counted.input_tokens == _prompt_tokens(usage)


def test_errors_become_exceptions_of_the_client(agent_client, tiny_cluster):
    with pytest.raises(anthropic.NotFoundError, match="gpt-17") as unknown:
        agent_client.messages.create(**{**_REQUEST, "model": "gpt-17"})
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id == unknown.value.body["request_id"]
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match="weather") as bad:
            request = {**_REQUEST, "extra_body": {"weather": 1}}
            agent_client.messages.create(**request, stream=stream)
        assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        messages = [{"role": "user", "content": [image]}]
        agent_client.messages.create(**{**_REQUEST, "messages": messages})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        messages = [{"role": "user", "content": "ball " * 9000}]
        agent_client.messages.create(**{**_REQUEST, "messages": messages})
    with pytest.raises(anthropic.NotFoundError):
        agent_client.messages.batches.list()
    errors = []
    for server in tiny_cluster.servers():
        response = http.post(f"{server.url}/v1/messages", json={"x": 1}, timeout=30)
        assert response.headers["request-id"] == response.json()["request_id"]
        errors.append(response.json()["error"])
    assert errors[0] == errors[1] == errors[2]


def _short_agent_request(name: str) -> dict[str, Any]:
    """Return a request of Claude Code with fewer tools, which fits the tiny model."""
    body = agent_request(name)
    return {**body, "tools": body["tools"][:4], "ignore_eos": True, "temperature": 0}


def test_session_of_claude_code_reads_its_prefix_from_the_cache(tiny_cluster):
    url = f"{tiny_cluster.url}/v1/messages"
    usages = []
    for name in ("first_turn", "second_turn"):
        body = {**_short_agent_request(name), "max_tokens": 8}
        response = http.post(f"{url}?beta=true", json=body, timeout=120)
        assert response.status_code == 200, response.text
        delta = next(
            json.loads(line.removeprefix("data: "))
            for line in response.text.splitlines()
            if line.startswith('data: {"type":"message_delta"')
        )
        assert delta["delta"]["stop_reason"] == "max_tokens"
        usages.append(delta["usage"])
    first, second = usages
    num_first = first["cache_creation_input_tokens"] + first["cache_read_input_tokens"]
    # All full blocks of the first prompt are read.
    assert num_first - 64 < second["cache_read_input_tokens"] <= num_first
    assert first["input_tokens"] == second["input_tokens"] == 0
    count = agent_request("count_tokens")
    response = http.post(f"{url}/count_tokens?beta=true", json=count, timeout=30)
    assert response.json()["input_tokens"] > 4096  # more than the context
