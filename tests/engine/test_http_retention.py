"""`cache_control` and `prompt_cache_retention` select parts of a prompt to retain."""

from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, Retention
from tests.rigs.http_server import serving_4k, text_script, with_template

CHAT = "/v1/chat/completions"
# This template writes the tools into the first turn, like Llama's template.
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{% if tools and loop.first %}\
{{ tools | tojson }}{% endif %}{{ m.content | trim }}</>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""
STRICT_TEMPLATE = (
    """{% if messages[-1].role == "system" %}{{ raise_exception("no question") }}\
{% endif %}"""
    + TEMPLATE
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def marked(ttl: str | None = None) -> dict[str, Any]:
    control = {"type": "ephemeral"}
    if ttl is not None:
        control["ttl"] = ttl
    return {"cache_control": control}


def text_part(text: str, **members: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **members}


async def send(
    tokenizer: Tokenizer, template: str = TEMPLATE, **body: Any
) -> AddRequest:
    templated = with_template(tokenizer, template)
    async with serving_4k(templated, text_script(templated, "ok")) as server:
        answer = await server.http.post(CHAT, json={"model": "m", **body})
        assert answer.status_code == 200, answer.text
        return server.engine.added[-1]


def kept_texts(tokenizer: Tokenizer, add: AddRequest) -> dict[str, float]:
    """Returns the seconds for which each part of the prompt is kept."""
    return {
        tokenizer.decode(add.token_ids[: retention.num_tokens]): retention.seconds
        for retention in add.retention
    }


SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": "Hi"}
YO = {"role": "assistant", "content": "Yo"}


@pytest.mark.parametrize("length", [1, 200])
async def test_mark_of_a_message_keeps_the_prompt_up_to_its_end(tokenizer, length):
    """The mark is near the beginning of the prompt, or near its end."""
    question = {"role": "user", "content": "Why? " * length}
    messages = [SYSTEM, {**USER, **marked("1h")}, YO, question]
    add = await send(tokenizer, messages=messages)
    assert kept_texts(tokenizer, add) == {"<system>Be brief.</><user>Hi</>": 3600.0}


async def test_marks_do_not_change_the_prompt(tokenizer):
    plain = await send(tokenizer, messages=[SYSTEM, USER], tools=[TOOL])
    add = await send(
        tokenizer,
        messages=[
            {**SYSTEM, "content": [text_part("Be brief. ", **marked())]},
            {**USER, **marked()},
        ],
        tools=[{**TOOL, **marked("1h")}],
    )
    assert add.token_ids == plain.token_ids


async def test_longest_part_of_each_duration_is_kept(tokenizer):
    messages = [
        {**SYSTEM, **marked("1h")},
        {**USER, **marked()},
        YO,
        {"role": "user", "content": [text_part("Why?", **marked())]},
    ]
    add = await send(tokenizer, messages=messages, prompt_cache_retention="24h")
    prompt = tokenizer.decode(add.token_ids)
    assert add.retention[0] == Retention(len(add.token_ids), 86400)
    assert add.retention[1] == Retention(len(add.token_ids), 300)
    assert prompt[: add.retention[2].num_tokens] == "<system>Be brief.</>"
    assert add.retention[2].seconds == 3600
    assert len(add.retention) == 3


async def test_mark_of_a_content_part_keeps_the_parts_before_it_too(tokenizer):
    parts = [text_part("one"), text_part("two", **marked()), text_part("three")]
    add = await send(tokenizer, messages=[{"role": "user", "content": parts}])
    assert kept_texts(tokenizer, add) == {"<user>one\ntwo": 300.0}


@pytest.mark.parametrize("messages", [[SYSTEM, USER], [USER, YO, USER]])
async def test_mark_of_a_tool_keeps_the_text_with_the_tools(tokenizer, messages):
    tools = [{**TOOL, **marked("1h")}, {**TOOL, "function": {"name": "go"}}]
    add = await send(tokenizer, messages=messages, tools=tools)
    ((text, seconds),) = kept_texts(tokenizer, add).items()
    assert '"look"' in text and '"go"' in text
    assert text.endswith("</>") and seconds == 3600.0


async def test_mark_where_the_template_cannot_end_is_left_out(tokenizer):
    messages = [{**SYSTEM, **marked()}, USER]
    add = await send(tokenizer, STRICT_TEMPLATE, messages=messages)
    assert add.retention == []


async def test_beginning_of_a_truncated_prompt_is_not_kept(tokenizer):
    messages = [{**SYSTEM, **marked()}, {**USER, **marked("1h")}]
    add = await send(tokenizer, messages=messages, truncate_prompt_tokens=20)
    assert add.retention == [Retention(20, 3600)]


async def test_each_prompt_of_a_request_is_kept(tokenizer):
    async with serving_4k(tokenizer, text_script(tokenizer, "ok")) as server:
        await server.post(prompt=["ab", "cdef"], prompt_cache_retention="24h")
        lengths = [add.retention for add in server.engine.added[-2:]]
        assert lengths == [[Retention(2, 86400)], [Retention(4, 86400)]]


@pytest.mark.parametrize(
    ("control", "problem"),
    [
        ({"type": "ephemeral", "ttl": "2h"}, '.ttl` is "2h"; it must be 5m or 1h.'),
        ({"type": "stable"}, '.type` is "stable"; it must be ephemeral.'),
        ("5m", '` is "5m"; it must be an object {"type": "ephemeral", "ttl": "5m" or'),
        ({"type": "ephemeral", "tt": "5m"}, ".tt` is not supported"),
    ],
)
async def test_wrong_mark_is_refused_with_its_field_value_and_fix(
    tokenizer, control, problem
):
    mark = {"cache_control": control}
    part = {"role": "user", "content": [text_part("Hi", **mark)]}
    bodies: dict[str, dict[str, Any]] = {
        "messages[0]": {"messages": [{**USER, **mark}]},
        "messages[0].content[0]": {"messages": [part]},
        "tools[0]": {"messages": [USER], "tools": [{**TOOL, **mark}]},
    }
    templated = with_template(tokenizer, TEMPLATE)
    async with serving_4k(templated, text_script(templated, "ok")) as server:
        for path, body in bodies.items():
            answer = await server.http.post(CHAT, json={"model": "m", **body})
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert message.startswith(f"`{path}.cache_control{problem}"), message
