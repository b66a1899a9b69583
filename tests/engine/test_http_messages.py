"""Answers of /v1/messages, read and sent back by Anthropic's own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from engine.text.tokenizer import Tokenizer
from protocol import resume
from protocol.http import sse
from protocol.messages import AddRequest, KVUsage, Retention, TokenDelta
from tests.engine.test_http_tools import CALL
from tests.rigs.agents import agent_request
from tests.rigs.anthropic_client import client_of
from tests.rigs.client import sse_events
from tests.rigs.http_server import (
    READY,
    SECRET,
    Server,
    end,
    events,
    scripted,
    serving,
    serving_4k,
    text_script,
    with_template,
)

# This template writes each field of the messages that it receives.
TEMPLATE = "{# <think></think> #}{% for m in messages %}{{ m.role }}:{{ m.content }}\
|{{ m.reasoning_content }}|{{ m.tool_call_id }}|\
{{ m.tool_calls | tojson if m.tool_calls }};\
{% endfor %}\
{{ tools | length if tools }},{{ enable_thinking }},{{ reasoning_effort }}"
TOOL: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
MESSAGES: Any = [{"role": "user", "content": "1 + 1?"}]
REQUEST: Any = {"model": "m", "max_tokens": 500, "messages": MESSAGES}
# Texts of the model, the blocks in the response, and the stop reason.
OUTPUTS = [
    ("<think>I add.</think>\nSo: ", ["thinking:I add.", "text:So: "], "end_turn"),
    ("Hello", ["text:Hello"], "end_turn"),
    ("", [], "end_turn"),
    (
        "<think>hm</think>" + CALL + CALL,
        ["thinking:hm", 'tool_use:{"a": 1}', 'tool_use:{"a": 1}'],
        "tool_use",
    ),
    (f"So:{CALL}Hm.", ["text:So:", 'tool_use:{"a": 1}', "text:Hm."], "tool_use"),
    ("<think>for ever", ["thinking:for ever"], "end_turn"),
]
READY_64K = replace(READY, max_model_len=65536)


def prompt_of(server: Server, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(server.engine.added[-1].token_ids)


def shown(message: Any) -> list[str]:
    """Return the type and the text of each block of a message."""
    texts = []
    for block in message.content:
        text = getattr(block, "text", None) or getattr(block, "thinking", None)
        texts.append(f"{block.type}:{text or json.dumps(block.input)}")
    return texts


@pytest.mark.parametrize(("text", "blocks", "reason"), OUTPUTS)
async def test_client_reads_the_same_blocks_with_and_without_a_stream(
    tokenizer, text, blocks, reason
):
    templated = with_template(tokenizer, TEMPLATE)
    script = text_script(templated, text, finish_reason="stop")
    request = {**REQUEST, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    async with serving_4k(templated, script) as server, client_of(server) as client:
        complete = await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert prompt_of(server, templated).endswith("1,True,")
        raw = await server.http.post("/v1/messages", json={**request, "stream": True})
    assert shown(complete) == shown(streamed) == blocks
    assert complete.stop_reason == streamed.stop_reason == reason
    assert complete.usage == streamed.usage
    thoughts = [block for block in complete.content if block.type == "thinking"]
    assert all(block.signature for block in thoughts)
    assert (complete.usage.output_tokens_details.thinking_tokens > 0) == bool(thoughts)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    names = [name for name, _ in events(raw)]
    assert names == [data["type"] for _, data in events(raw)]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == len(blocks)
    starts = [i for i, name in enumerate(names) if name == "content_block_start"]
    stops = [i for i, name in enumerate(names) if name == "content_block_stop"]
    assert all(a < b for a, b in zip(starts, stops, strict=True))


async def test_call_that_ends_in_the_same_piece_as_text_stays_one_call(tokenizer):
    """Without an end tag, only the end of the answer ends the call's parameter."""
    text = "<tool_call><function=add><parameter=a>1</tool_call>\nso"
    script = text_script(tokenizer, text, finish_reason="stop")
    tool = {"type": "function", "name": "add", "parameters": TOOL["input_schema"]}
    async with (
        serving_4k(tokenizer, script, tool_call_parser="qwen3_coder") as server,
        client_of(server) as client,
    ):
        complete = await client.messages.create(**REQUEST, tools=[TOOL])
        async with client.messages.stream(**REQUEST, tools=[TOOL]) as stream:
            streamed = await stream.get_final_message()
        body = {"model": "m", "input": "1 + 1?", "tools": [tool]}
        response = await server.http.post("/v1/responses", json=body)
    assert shown(complete) == shown(streamed) == ['tool_use:{"a": 1}', "text:\nso"]
    call, message = response.json()["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1})
    assert message["content"][0]["text"] == "\nso"


async def test_response_matches_the_clients_type(tokenizer):
    async with serving_4k(tokenizer, text_script(tokenizer, "Hi.")) as server:
        response = await server.http.post("/v1/messages?beta=true", json=REQUEST)
        from anthropic.types import Message  # see client_of

        message = Message.model_validate(response.json(), strict=True)
        assert message.id.startswith("msg_") and message.model == "m"
        assert response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
async def test_stop_reason(tokenizer, finish_reason):
    cases: dict[str, list[Any]] = {
        "stop": [
            ({"stop_sequences": ["lo"]}, "stop_sequence", "lo"),
            ({}, "end_turn", None),
        ],
        "length": [
            ({"max_tokens": 5}, "max_tokens", None),
            ({"max_tokens": 9}, "model_context_window_exceeded", None),
        ],
    }
    script = text_script(tokenizer, "Hello", finish_reason=finish_reason)
    async with serving_4k(tokenizer, script) as server, client_of(server) as client:
        for fields, reason, sequence in cases[finish_reason]:
            answer = await client.messages.create(**{**REQUEST, **fields})
            assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


async def test_limit_beyond_the_context_is_lowered_to_what_fits(tokenizer):
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        body = {**REQUEST, "max_tokens": 32000}
        assert (await server.http.post("/v1/messages", json=body)).status_code == 200
        (add,) = server.engine.added
        assert add.max_tokens == 4096 - len(add.token_ids)


async def test_conversation_can_be_sent_back_unchanged(tokenizer):
    templated = with_template(tokenizer, TEMPLATE)
    text = f"<think>I add.</think>So:{CALL}"
    script = text_script(templated, text, finish_reason="stop")
    async with serving_4k(templated, script) as server, client_of(server) as client:
        first = await client.messages.create(**REQUEST, tools=[TOOL])
        call = first.content[-1]
        assert call.type == "tool_use"
        result: Any = {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look:"},
                {"type": "tool_result", "tool_use_id": call.id, "content": "2"},
            ],
        }
        turn: Any = {"role": "assistant", "content": first.content}
        conversation = [*MESSAGES, turn, result]
        await client.messages.create(
            model="m", max_tokens=9, messages=conversation, tools=[TOOL]
        )
        prompt = prompt_of(server, templated)
    function = {"name": "add", "arguments": {"a": 1}}
    calls = json.dumps([{"id": call.id, "type": "function", "function": function}])
    assert prompt == (
        f"user:1 + 1?|||;assistant:So:|I add.||{calls};tool:2||{call.id}|;"
        "user:Look:|||;1,,"
    )


# Fields of a request, and the prompt that the request becomes.
PROMPTS: Any = [
    ({}, "user:1 + 1?|||;,,"),
    ({"system": "Be kind."}, "system:Be kind.|||;user:1 + 1?|||;,,"),
    (
        {"system": [{"type": "text", "text": t} for t in ("Be", "kind.")]},
        "system:Be\nkind.|||;user:1 + 1?|||;,,",
    ),
    (
        {"messages": [*MESSAGES, {"role": "user", "content": "Now."}]},
        "user:1 + 1?\nNow.|||;,,",
    ),
    (
        {
            "messages": [
                *MESSAGES,
                {"role": "system", "content": "Be short."},
                *MESSAGES,
            ]
        },
        "user:1 + 1?|||;system:Be short.|||;user:1 + 1?|||;,,",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "user:1 + 1?|||;,True,"),
    ({"thinking": {"type": "disabled"}}, "user:1 + 1?|||;,False,"),
    ({"output_config": {"effort": "high"}}, "user:1 + 1?|||;,True,high"),
    (
        {
            "messages": [
                *MESSAGES,
                {
                    "role": "assistant",
                    "content": [{"type": "redacted_thinking", "data": "x"}],
                },
                *MESSAGES,
            ]
        },
        "user:1 + 1?|||;assistant:|||;user:1 + 1?|||;,,",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "user:1 + 1?|||;,,"),
]


async def test_request_becomes_a_prompt_and_its_tokens_are_counted(tokenizer):
    templated = with_template(tokenizer, TEMPLATE)
    async with (
        serving_4k(templated, text_script(templated, "x")) as server,
        client_of(server) as client,
    ):
        for fields, prompt in PROMPTS:
            counted = {**REQUEST, **fields}
            answer = await client.messages.create(**counted)
            del counted["max_tokens"]
            count = await client.messages.count_tokens(**counted)
            assert prompt_of(server, templated) == prompt
            usage = answer.usage
            assert count.input_tokens == len(server.engine.added[-1].token_ids)
            num_read = usage.cache_read_input_tokens
            assert count.input_tokens == usage.input_tokens + num_read


async def test_answer_continues_the_assistants_last_message(tokenizer):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    templated = with_template(tokenizer, template)
    turn: Any = {"role": "assistant", "content": "It is "}
    async with (
        serving_4k(templated, text_script(templated, "2")) as server,
        client_of(server) as client,
    ):
        await client.messages.create(**{**REQUEST, "messages": [*MESSAGES, turn]})
        assert prompt_of(server, templated) == "<user>1 + 1?</><assistant>It is "


@pytest.mark.parametrize(
    ("choice", "grammar", "text"),
    [
        ({"type": "tool", "name": "add"}, "json_schema", '{"a": 1}'),
        ({"type": "any"}, "calls", '[{"name": "add", "parameters": {"a": 1}}]'),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, f"{CALL}{CALL}"),
    ],
)
async def test_tool_call_can_be_required(tokenizer, choice, grammar, text):
    script = text_script(tokenizer, text, finish_reason="stop")
    async with serving_4k(tokenizer, script) as server, client_of(server) as client:
        answer = await client.messages.create(
            **REQUEST, tools=[TOOL], tool_choice=choice
        )
        assert shown(answer) == ['tool_use:{"a": 1}']
        assert answer.stop_reason == "tool_use"
        actual = server.engine.added[0].sampling.grammar
        assert (actual and actual.kind) == grammar


async def test_arguments_that_are_cut_off_are_marked_as_invalid(tokenizer):
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    script = text_script(tokenizer, text, finish_reason="length")
    async with serving_4k(tokenizer, script) as server, client_of(server) as client:
        request = {**REQUEST, "tools": [TOOL], "max_tokens": len(text)}
        answer = await client.messages.create(**request)
        assert answer.stop_reason == "max_tokens"
        assert answer.content[0].input == {"INVALID_JSON": '{"a": 1'}


async def test_numbers_of_a_call_reach_the_client_as_the_model_wrote_them(tokenizer):
    number = "0.30000000000000004441"
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>'
    script = text_script(tokenizer, text, finish_reason="stop")
    async with serving_4k(tokenizer, script) as server:
        body = {**REQUEST, "tools": [TOOL]}
        response = await server.http.post("/v1/messages", json=body)
        assert f'"input":{{"a": {number}}}' in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_that_the_client_omits_has_a_block_without_text(
    tokenizer, stream
):
    templated = with_template(tokenizer, TEMPLATE)
    script = text_script(templated, "<think>I add.</think>2", finish_reason="stop")
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    async with serving_4k(templated, script) as server, client_of(server) as client:
        async with client.messages.stream(**REQUEST, thinking=thinking) as events_:
            answer = await events_.get_final_message()
        if not stream:
            answer = await client.messages.create(**REQUEST, thinking=thinking)
        thought, text = answer.content
        assert (thought.thinking, text.text) == ("", "2") and thought.signature


@pytest.mark.parametrize("has_frames", [False, True])
@pytest.mark.parametrize("is_thinking", [False, True])
async def test_silent_stream_has_pings(tokenizer, monkeypatch, is_thinking, has_frames):
    """A stream is silent while the engine draws no tokens, and while it draws tokens of
    reasoning that the client does not get.
    """
    monkeypatch.setattr(sse, "PING_INTERVAL_S", 0.02)
    templated = with_template(tokenizer, TEMPLATE)
    has_pinged = asyncio.Event()

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        begin = "<think>" if is_thinking else "He"
        async for delta in text_script(templated, begin)(request):
            if delta.finish_reason is None:
                yield delta
        while not has_pinged.is_set():
            ids = templated.encode("a") if is_thinking else []
            if ids:
                yield TokenDelta(request_id=request.request_id, token_ids=ids)
            await asyncio.sleep(0.001)
        rest = "</think>Hello" if is_thinking else "llo"
        async for delta in text_script(templated, rest)(request):
            yield delta

    thinking = {"type": "adaptive", "display": "omitted"}
    body = {**REQUEST, "stream": True, "thinking": thinking, "max_tokens": 4000}
    headers = {}
    if has_frames:
        value = resume.frames_request(SECRET, b"r").decode()
        headers = {"x-request-id": "r", resume.HEADER: value}
    received = b""
    async with serving_4k(templated, script) as server:
        request = server.http.stream("POST", "/v1/messages", json=body, headers=headers)
        async with request as response:
            async for data in response.aiter_bytes():
                received += data
                if received.count(b"event: ping") >= 3:
                    has_pinged.set()
    if has_frames:
        frames = resume.Frames().feed(received)
        texts = [text for text, events_ in frames if b"event: ping" in events_]
        # The frame of a ping has the tokens since the last frame, if any.
        assert all(text.startswith(b"[") for text in texts)
        received = b"".join(events_ for _, events_ in frames)
    names_and_data = [
        (name, json.loads(text)) for name, text in sse_events(received.decode())
    ]
    assert [name for name, _ in names_and_data[:2]] == ["message_start", "ping"]
    assert all(
        data == {"type": name} for name, data in names_and_data if name == "ping"
    )
    deltas = [data["delta"] for name, data in names_and_data if name.endswith("_delta")]
    assert "".join(delta.get("text", "") for delta in deltas) == "Hello"


async def test_answer_can_be_required_to_match_a_schema(tokenizer):
    script = text_script(tokenizer, '{"title": "Hi"}', finish_reason="stop")
    async with serving_4k(tokenizer, script) as server:
        body = agent_request("title", model="m", stream=False)
        response = await server.http.post("/v1/messages", json=body)
        assert response.status_code == 200, response.text
        (add,) = server.engine.added
        assert add.sampling.grammar.kind == "json_schema"
        config = {"format": {"type": "json_schema", "schema": {"$ref": "x"}}}
        body = {**REQUEST, "output_config": config}
        refused = await server.http.post("/v1/messages", json=body)
        assert refused.json()["error"]["param"] == "output_config.format.schema"


# -- caching


@pytest.mark.parametrize(
    ("control", "created", "input_tokens"), [(None, 0, 7), ({}, 7, 0)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_adds_up_to_the_prompt(
    tokenizer, control, created, input_tokens, stream
):
    """The prompt `user:1 + 1?;` has 12 tokens. The engine reports that 5 are cached."""
    usage = KVUsage(skipped=5, recomputed=7, cached_tokens=5)
    deltas = [{"token_ids": [70], "usage": usage}, end(usage=usage)]
    block: Any = {"type": "text", "text": "1 + 1?"}
    if control is not None:
        block["cache_control"] = {"type": "ephemeral", "ttl": "1h", **control}
    request = {**REQUEST, "messages": [{"role": "user", "content": [block]}]}
    async with (
        serving_4k(tokenizer, scripted(*deltas)) as server,
        client_of(server) as client,
    ):
        if stream:
            async with client.messages.stream(**request) as stream_events:
                actual = (await stream_events.get_final_message()).usage
                first = stream_events.response
        else:
            actual = (await client.messages.create(**request)).usage
        assert actual.cache_read_input_tokens == 5
        assert actual.cache_creation_input_tokens == created
        assert actual.input_tokens == input_tokens
        assert actual.cache_creation.ephemeral_1h_input_tokens == created
        assert actual.output_tokens == 1
        if stream:
            assert first.status_code == 200
        raw = await server.http.post("/v1/messages", json={**request, "stream": True})
        start = events(raw)[0][1]["message"]["usage"]
        assert start["cache_read_input_tokens"] == 5


async def test_cache_control_asks_the_engine_to_keep_the_prompt(tokenizer):
    hour: Any = {"type": "ephemeral", "ttl": "1h"}
    async with serving_4k(tokenizer, text_script(tokenizer, "x")) as server:
        system = [{"type": "text", "text": "12345678", "cache_control": hour}]
        block = {"type": "text", "text": "12", "cache_control": {"type": "ephemeral"}}
        body = {
            **REQUEST,
            "system": system,
            "messages": [{"role": "user", "content": [block]}],
        }
        assert (await server.http.post("/v1/messages", json=body)).status_code == 200
        assert (await server.http.post("/v1/messages", json=REQUEST)).status_code == 200
        top_level = {**REQUEST, "cache_control": hour}
        response = await server.http.post("/v1/messages", json=top_level)
        assert response.status_code == 200
        marked, plain, whole = server.engine.added
        prompt = tokenizer.decode(marked.token_ids)
        num_system = prompt.index("12345678") + len("12345678")
        by_seconds = {each.seconds: each.num_tokens for each in marked.retention}
        assert by_seconds[300] == len(marked.token_ids)
        assert num_system <= by_seconds[3600] < len(marked.token_ids)
        assert plain.retention == []
        assert whole.retention == [Retention(len(whole.token_ids), 3600)]


# -- requests of Claude Code


async def test_requests_of_claude_code_are_served_unchanged(tokenizer):
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
        "authorization": "Bearer x",
    }
    async with serving(
        tokenizer, text_script(tokenizer, "{}"), ready=READY_64K, max_body=1 << 20
    ) as server:
        for name in ("first_turn", "second_turn", "title", "quota"):
            body = agent_request(name, model="m")
            response = await server.http.post(
                "/v1/messages?beta=true", json=body, headers=headers
            )
            assert response.status_code == 200, (name, response.text)
            if "context_management" in body:
                delta = dict(events(response))["message_delta"]
                assert delta["context_management"] == {"applied_edits": []}
        counted = await server.http.post(
            "/v1/messages/count_tokens?beta=true",
            json=agent_request("count_tokens", model="m"),
            headers=headers,
        )
        assert counted.json()["input_tokens"] > 1000


async def test_next_turn_of_claude_code_has_the_prompt_of_the_turn_before(tokenizer):
    """Neither the line for Anthropic's billing nor the place of `cache_control`
    changes the prompt.
    """
    async with serving(
        tokenizer, text_script(tokenizer, "x"), ready=READY_64K, max_body=1 << 20
    ) as server:
        for name in ("first_turn", "second_turn"):
            body = agent_request(name, model="m")
            response = await server.http.post("/v1/messages", json=body)
            assert response.status_code == 200, response.text
        first, second = (add.token_ids for add in server.engine.added)
        assert second[: len(first)] == first and len(second) > len(first)
