"""Chat templates receive a message's content as text, as null, or not at all."""

from typing import Any

import pytest

from tests.rigs.http_server import serving_4k, with_template

# This template writes the content, or states that it is absent, null or empty.
TEMPLATE = """{% for m in messages %}{{ m.role }}:
{%- if 'content' not in m %}absent{% elif m.content is none %}null
{%- elif m.content == '' %}empty{% else %}{{ m.content }}{% endif %}
{%- if m.tool_calls %} calls{% endif %};{% endfor %}{# tools #}"""
# The templates of DeepSeek R1 and V3 write a turn's calls only if its content is none.
DEEPSEEK = """\
{%- for m in messages %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}<call>{{ call['function']['name'] }}{% endfor %}
{%- else %}{{ m['role'] }}:{{ m['content'] }};{% endif %}
{%- endfor %}{# tools #}"""
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
]
USER = {"role": "user", "content": "Hi"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}


async def send_for_prompts(
    tokenizer: Any, template: str, path: str, body: dict[str, Any]
) -> list[str]:
    """Send a request. Return the text of the prompt. If the request has messages, also
    return the text that /tokenize encodes."""
    shaped = with_template(tokenizer, template)
    async with serving_4k(shaped) as server:
        response = await server.http.post(path, json={"model": "m", **body})
        assert response.status_code == 200, response.text
        actual = [tokenizer.decode_all(server.engine.added[0].token_ids)]
        if "messages" in body:
            response = await server.http.post("/tokenize", json=body)
            actual.append(tokenizer.decode_all(response.json()["tokens"]))
    return actual


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"content": None}, "null"),
        ({}, "absent"),
        ({"content": ""}, "empty"),
        ({"content": []}, "empty"),
        ({"content": [{"type": "text", "text": "I add."}]}, "I add."),
    ],
)
async def test_templates_receive_the_content_that_the_client_sent(
    tokenizer, content, expected
):
    turn = {"role": "assistant", "tool_calls": CALLS, **content}
    body = {"messages": [USER, turn, RESULT]}
    actual = await send_for_prompts(tokenizer, TEMPLATE, "/v1/chat/completions", body)
    assert actual == [f"user:Hi;assistant:{expected} calls;tool:2;"] * 2


@pytest.mark.parametrize(
    ("content", "expected"), [({"content": None}, "null"), ({}, "absent")]
)
async def test_turn_with_only_reasoning_has_no_content(tokenizer, content, expected):
    turn = {"role": "assistant", "reasoning_content": "hm", **content}
    actual = await send_for_prompts(
        tokenizer, TEMPLATE, "/v1/chat/completions", {"messages": [USER, turn]}
    )
    assert actual == [f"user:Hi;assistant:{expected};"] * 2


async def test_templates_that_test_for_null_content_write_calls(tokenizer):
    turn = {"role": "assistant", "content": None, "tool_calls": CALLS}
    body = {"messages": [USER, turn, RESULT]}
    actual = await send_for_prompts(tokenizer, DEEPSEEK, "/v1/chat/completions", body)
    assert actual == ["user:Hi;<call>addtool:2;"] * 2


# Expressions with which templates of released models write the content, and their
# output for null. GLM-4.5's template tests the type of the content first. Other
# templates concatenate the content with text, or write the message as JSON.
WRITERS = {
    "{% macro text(c) %}{% if c is string %}{{ c }}{% elif c is iterable and c is not "
    "mapping %}{% for part in c %}{{ part.text }}{% endfor %}{% else %}{{ c }}{% endif "
    "%}{% endmacro %}"
    "{{ text(m.content) }}": "",
    "{{ '<' + m.content + '>' }}": "<>",
    "{{ m.content.split('</think>')[-1] | trim }}": "",
    "{{ m.content }}": "",
    "{{ m.content == none }} {{ m.content != none }} {{ m.content is string }}": (
        "True False False"
    ),
    "{{ {'content': m.content} | tojson }} {{ m.content | tojson }}": (
        '{"content": null} null'
    ),
    "{{ [m] | tojson }}": '[{"content": null, "role": "assistant"}]',
}


@pytest.mark.parametrize("writer", WRITERS)
async def test_template_writes_null_content_as_empty_text(tokenizer, writer):
    """A template that does not test for null must not write the text "None"."""
    template = (
        "{% set m = messages[-1] %}{% if m.tool_calls %}{# tools #}{% endif %}>"
        + writer
    )
    if "[m]" in writer:
        template = template.replace("[m]", "[{'content': m.content, 'role': m.role}]")
    turn = {"role": "assistant", "content": None, "tool_calls": CALLS}
    body = {"messages": [USER, turn]}
    actual = await send_for_prompts(tokenizer, template, "/v1/chat/completions", body)
    assert actual == [f">{WRITERS[writer]}"] * 2


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], "null calls"),
        ([{"type": "reasoning", "summary": []}], "null calls"),
        (
            [
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "hm"}],
                }
            ],
            "null calls",
        ),
        ([{"role": "assistant", "content": "So."}], "So. calls"),
        ([{"role": "assistant", "content": ""}], "empty calls"),
    ],
)
async def test_calls_of_the_responses_api_have_a_null_content(
    tokenizer, items, expected
):
    """In the chat API, a message that has only calls has a null content."""
    call = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "add",
        "arguments": "{}",
    }
    output = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
    body = {"input": [USER, *items, call, output]}
    actual = await send_for_prompts(tokenizer, TEMPLATE, "/v1/responses", body)
    assert actual == [f"user:Hi;assistant:{expected};tool:2;"]


async def test_turn_with_only_encrypted_reasoning_is_refused(tokenizer):
    async with serving_4k(tokenizer) as server:
        body = {"prompt": None, "input": [{"type": "reasoning", "summary": []}]}
        response = await server.post("/v1/responses", **body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "input"


async def test_user_needs_content(tokenizer):
    async with serving_4k(tokenizer) as server:
        for content in ({"content": None}, {}):
            response = await server.chat(messages=[{"role": "user", **content}])
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "messages[0].content"


async def test_turn_without_content_can_be_continued(tokenizer):
    turn = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    body = {"messages": [USER, turn], "continue_final_message": True}
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    actual = await send_for_prompts(tokenizer, plain, "/v1/chat/completions", body)
    assert actual == ["user:Hi;assistant:"] * 2
