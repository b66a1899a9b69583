"""Each endpoint honours, ignores or refuses each field except the prompt."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from msgspec.structs import replace

from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, Retention, TokenDelta
from tests.rigs.http_server import Server, serving_4k, text_script, with_template

COMPLETIONS, CHAT, RESPONSES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
)
ALL_PATHS = (COMPLETIONS, CHAT, RESPONSES)
IGNORED: Final = "ignored"

# This template writes the history and the variables that a chat request can set.
TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content }}|\
{{ m.reasoning_content }}{{ m.thinking }};{% endfor %}\
{{ enable_thinking }},{{ thinking }},{{ reasoning_effort }},{{ verbosity }}"""
HISTORY = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
THOUGHT = {"type": "thinking", "thinking": "hm"}
HINTS = {
    "protocol_version": "0.1",
    "message_id": "m",
    "actions": [
        {
            "action_id": "a",
            "action_type": "kv.fetch",
            "action_version": "1.0",
            "payload": {"block_hashes": [11]},
        }
    ],
}
CACHED = {"cache_control": {"type": "ephemeral"}}


def keeps_prompt(seconds: int) -> Any:
    return lambda _, add: add.retention == [Retention(len(add.token_ids), seconds)]


def has_prompt(text: str) -> Any:
    return lambda tokenizer, add: tokenizer.decode(add.token_ids) == text


def has_prediction(text: str) -> Any:
    return lambda tokenizer, add: tokenizer.decode(add.prediction) == text


def has_grammar(**expected_fields: Any) -> Any:
    def holds(tokenizer: Tokenizer, add: AddRequest) -> bool:
        actual = add.sampling.grammar
        return actual is not None and all(
            getattr(actual, n) == v for n, v in expected_fields.items()
        )

    return holds


# Endpoints, fields, and the outcome: IGNORED, a check of the AddRequest, or the text of
# a refusal.
TABLE: list[tuple[tuple[str, ...], dict[str, Any], Any]] = [
    (ALL_PATHS, {"metadata": {"run": "7"}}, IGNORED),
    (ALL_PATHS, {"store": True}, IGNORED),
    *((ALL_PATHS, {"service_tier": tier}, IGNORED)
      for tier in ("auto", "flex", "priority")),
    (ALL_PATHS, {"prompt_cache_key": "session 7"}, IGNORED),
    (ALL_PATHS, {"prompt_cache_retention": "24h"}, keeps_prompt(86400)),
    (ALL_PATHS, {"prompt_cache_retention": "in_memory"}, keeps_prompt(300)),
    (ALL_PATHS, {"prompt_cache_retention": "1h"},
     "`prompt_cache_retention` is \"1h\"; it must be in_memory or 24h."),
    (ALL_PATHS, {"prompt_cache_key": 7},
     "`prompt_cache_key` is 7; it must be a string"),
    (ALL_PATHS, {"prompt_cache_options": {"ttl": "30m"}}, IGNORED),
    (ALL_PATHS, {"kv_hints": HINTS}, IGNORED),
    (ALL_PATHS, {"kv_hints": {"actions": []}},
     "`kv_hints.protocol_version` is missing; it must be a string."),
    (ALL_PATHS, {"kv_hints": {**HINTS, "actions": [1] * 5000}},
     "`kv_hints.actions[0]` is 1; it must be an object with"),
    (ALL_PATHS, {"kv_hints": {**HINTS, "actions": [{"action_id": 7}]}},
     "`kv_hints.actions[0].action_id` is 7; it must be a string."),
    (ALL_PATHS, {"cache_salt": "a"}, lambda _, add: len(add.cache_salt) == 32),
    *(((COMPLETIONS, CHAT), {"prediction": {"type": "content", "content": content}},
       has_prediction(text)) for content, text in (
        ("", ""),
        ("Yo", "Yo"),
        ([{"type": "text", "text": "Yo"}], "Yo"),
        ([{"type": "text", "text": "Yo"}, {"type": "text", "text": "a"}], "Yo\na"))),
    *(((COMPLETIONS, CHAT), {"prediction": value}, refusal) for value, refusal in (
        ("Yo", '`prediction` is "Yo"; it must be an object {"type": "content", '
         '"content": "..."}.'),
        ({"content": "Yo"}, "`prediction.type` is missing; it must be content."),
        ({"type": "text", "content": "Yo"},
         '`prediction.type` is "text"; it must be content.'),
        ({"type": "content"},
         "`prediction.content` is missing; it must be a string or a list of text "
         "parts."),
        ({"type": "content", "content": 7},
         "`prediction.content` is 7; it must be a string or a list of text parts."),
        ({"type": "content", "content": [{"type": "image", "text": ""}]},
         '`prediction.content[0]` is {"type": "image", "text": ""}; it must be a part '
         '{"type": "text", "text": "..."}.'),
        ({"type": "content", "content": "", "tokens": 5},
         "`prediction.tokens` is not supported"))),
    ((RESPONSES,), {"prediction": {"type": "content", "content": "Yo"}},
     "`prediction` is not a parameter of /v1/responses but of"),
    ((RESPONSES,), {"client_metadata": {"installation": "7"}}, IGNORED),
    (ALL_PATHS, {"safety_identifier": "abc", "user": "u"}, IGNORED),
    (ALL_PATHS, {"stream": True, "stream_options": {"include_obfuscation": True}},
     IGNORED),
    (ALL_PATHS, {"stream_options": {"include_obfuscation": True}},
     "`stream_options` needs `stream`"),
    (ALL_PATHS, {"store": "yes"}, "`store` is \"yes\"; it must be true or false."),
    (ALL_PATHS, {"frobnicate": 1}, "`frobnicate` is not supported"),
    ((COMPLETIONS,), {"suffix": "end"},
     "`suffix` is \"end\", which is not implemented"),
    ((COMPLETIONS, CHAT), {"logit_bias": {"5": -100}},
     lambda _, add: add.sampling.logit_bias == {5: -100.0}),
    ((COMPLETIONS, CHAT), {"allowed_token_ids": [5, 9]},
     has_grammar(kind="any", allowed=(5, 9))),
    ((COMPLETIONS, CHAT), {"allowed_token_ids": [5], "guided_regex": "a+"},
     has_grammar(kind="regex", text="a+", allowed=(5,))),
    ((COMPLETIONS, CHAT), {"allowed_token_ids": [999]},
     "`allowed_token_ids` has the token id 999"),
    ((COMPLETIONS, CHAT), {"allowed_token_ids": []},
     "it must be a list of 1 to 65536 token ids"),
    ((COMPLETIONS, CHAT), {"bad_words": []}, IGNORED),
    ((COMPLETIONS, CHAT), {"bad_words": ["a", "bc"]},
     lambda tokenizer, add: has_grammar(
        kind="any", banned=tuple(tuple(tokenizer.encode(word)) for word in ("a", "bc"))
    )(tokenizer, add)),
    ((COMPLETIONS, CHAT), {"bad_words": [""]},
     "`bad_words` is [\"\"]; it must be a list of"),
    ((CHAT,), {"parallel_tool_calls": False}, IGNORED),
    ((CHAT,), {"verbosity": "low"}, has_prompt("user:Hi|;,,,low")),
    ((RESPONSES,), {"text": {"verbosity": "low"}}, has_prompt("user:Hi|;,,,low")),
    # The engine ignores this field: test_http_reasoning.py tests the response.
    ((CHAT,), {"include_reasoning": False}, IGNORED),
    ((CHAT,), {"verbosity": "loud"}, "it must be low, medium or high"),
    ((CHAT,), {"reasoning_effort": "high"}, has_prompt("user:Hi|;True,True,high,")),
    ((CHAT,), {"reasoning_effort": "none"}, has_prompt("user:Hi|;False,False,,")),
    ((CHAT,), {"reasoning_effort": 3},
     "`reasoning_effort` is 3; it must be none, minimal, low"),
    ((CHAT,), {"enable_thinking": False}, has_prompt("user:Hi|;False,False,,")),
    ((CHAT,),
     {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": 5}},
     has_prompt("user:Hi|;5,False,,")),
    ((CHAT,), {"messages": [{**HISTORY[0], **CACHED}]}, keeps_prompt(300)),
    ((CHAT,),
     {"messages": [{**HISTORY[0],
                    "content": [{"type": "text", "text": "Hi", **CACHED}]}]},
     keeps_prompt(300)),
    *(((CHAT,), {"messages": [HISTORY[0], {**HISTORY[1], name: "hm"}]},
       has_prompt("user:Hi|;assistant:Yo|hmhm;,,,"))
      for name in ("reasoning_content", "reasoning")),
    # History as litellm sends it for Claude Code, for several providers, and as
    # OpenAI's client sends it.
    *(((CHAT,), {"messages": [HISTORY[0], {"role": "assistant", **turn}]},
       has_prompt(f"user:Hi|;assistant:{text}|hmhm;,,,")) for text, turn in (
        ("Yo", {"content": "Yo", "thinking_blocks": [{**THOUGHT, "signature": ""}]}),
        ("Yo", {"content": [THOUGHT, {"type": "text", "text": "Yo"}]}),
        ("", {"content": None, "thinking_blocks": [THOUGHT]}),
        ("", {"content": [THOUGHT]}),
        ("", {"content": None, "reasoning_content": "hm"}))),
    ((CHAT,), {"messages": [HISTORY[0], {**HISTORY[1], "parsed": {"a": 1}}]},
     has_prompt("user:Hi|;assistant:Yo|;,,,")),
    ((CHAT,), {"messages": [{**HISTORY[0], "reasoning_content": ""}]}, IGNORED),
]  # fmt: skip


async def _post(
    server: Server, path: str, fields: dict[str, Any]
) -> tuple[int, str, AddRequest | None]:
    prompt_fields = {
        COMPLETIONS: {},
        CHAT: {"messages": HISTORY[:1]},
        RESPONSES: {"input": "Hi"},
    }[path]
    body: dict[str, Any] = {"seed": 7, **prompt_fields, **fields}
    before = len(server.engine.added)
    if path == RESPONSES:
        answer = await server.http.post(path, json=body)
    else:
        answer = await server.post(path, **body)
    added = server.engine.added[before:]
    text = answer.text
    if answer.status_code != 200:
        text = answer.json()["error"]["message"]
    return answer.status_code, text, added[0] if added else None


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_each_field_is_honoured_ignored_or_refused(tokenizer, path):
    templated = with_template(tokenizer, TEMPLATE)
    async with serving_4k(templated, text_script(templated, "ok")) as server:
        _, _, plain = await _post(server, path, {})
        assert plain is not None
        for paths, fields, outcome in TABLE:
            if path not in paths:
                continue
            status, text, add = await _post(server, path, fields)
            if isinstance(outcome, str) and outcome != IGNORED:
                assert (status, add) == (400, None) and outcome in text, fields
                continue
            assert status == 200 and add is not None, (fields, text)
            if outcome == IGNORED:
                assert replace(add, request_id=plain.request_id) == plain, fields
            else:
                assert outcome(templated, add), (
                    fields,
                    templated.decode(add.token_ids),
                )


NUM_ITEMS = 123_457  # no other list in this process has this length


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (COMPLETIONS, "prompt_cache_options"),
        (CHAT, "prompt_cache_options"),
        (RESPONSES, "client_metadata"),
        (CHAT, "metadata"),
        (CHAT, "chat_template_kwargs"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_inputs_are_freed_while_an_answer_is_generated(
    tokenizer, path, field, stream
):
    is_generating = asyncio.Event()
    may_end = asyncio.Event()

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(request_id=request.request_id, token_ids=[65])
        is_generating.set()
        await may_end.wait()
        async for delta in text_script(tokenizer, "b")(request):
            yield delta

    text = {COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}
    body = {"model": "m", "stream": stream, **text.get(path, {"messages": HISTORY[:1]})}
    async with serving_4k(tokenizer, script, max_body=1_000_000) as server:
        data = json.dumps({**body, field: {"a": [0] * NUM_ITEMS}}).encode()
        answering = asyncio.create_task(server.http.post(path, content=data))
        await is_generating.wait()
        gc.collect()
        held = [
            item
            for item in gc.get_objects()
            if type(item) is list and len(item) == NUM_ITEMS
        ]
        assert not held
        may_end.set()
        assert (await answering).status_code == 200
