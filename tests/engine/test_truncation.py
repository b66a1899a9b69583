"""Truncation of prompts by truncate_prompt_tokens, and by /v1/responses."""

import string
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.text.tokenizer import Tokenizer
from tests.engine.test_http_responses import FLAT
from tests.engine.test_tokenizer import write_sentencepiece_style
from tests.rigs.http_server import (
    CONTEXT,
    READY,
    Server,
    serving,
    text_script,
    with_template,
)

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
READY_4K = replace(READY, max_model_len=4096)
# A prompt of 520 tokens, because each character is a token.
ALPHABET = string.ascii_lowercase * 20


async def send_for_prompt(
    server: Server, path: str = "/v1/completions", **body: Any
) -> list[int]:
    """Send a request. Return the token ids of the prompt that the engine receives."""
    answer = await server.http.post(path, json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    return server.engine.added[-1].token_ids


async def send_for_error(
    server: Server, path: str = "/v1/completions", **body: Any
) -> dict[str, Any]:
    answer = await server.http.post(path, json={"model": "m", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# -- truncate_prompt_tokens ------------------------------------------------------------


async def test_each_prompt_is_truncated_to_its_last_tokens(tokenizer):
    async with serving(tokenizer, text_script(tokenizer, "x")) as server:
        ids = tokenizer.encode(ALPHABET)
        for prompt in (ALPHABET, ids):
            assert (
                await send_for_prompt(server, prompt=prompt, truncate_prompt_tokens=7)
                == ids[-7:]
            )
        for prompt in ("ab", ids[:2]):  # the prompt is not longer than the limit
            assert (
                await send_for_prompt(server, prompt=prompt, truncate_prompt_tokens=2)
                == ids[:2]
            )
        several = {"prompt": [ALPHABET, "b"], "truncate_prompt_tokens": 3}
        await send_for_prompt(server, **several)
        assert [add.token_ids for add in server.engine.added[-2:]] == [
            ids[-3:],
            ids[1:2],
        ]
        messages = [{"role": "user", "content": ALPHABET}]
        chat = {"messages": messages, "truncate_prompt_tokens": 5}
        assert await send_for_prompt(server, CHAT, **chat) == tokenizer.encode("wxyz;")
        response = {"input": ALPHABET, "truncate_prompt_tokens": 5}
        assert await send_for_prompt(server, RESPONSES, **response) == tokenizer.encode(
            "wxyz;"
        )


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({"max_tokens": 10}, CONTEXT - 10),
        ({"max_tokens": 10, "max_completion_tokens": 9}, CONTEXT - 9),
        ({"max_tokens": 0}, CONTEXT),
        # A quarter of the context stays free for an answer of unknown length.
        ({}, CONTEXT - CONTEXT // 4),
    ],
)
async def test_minus_1_keeps_tokens_that_fit_the_context_with_the_answer(
    limits, num_tokens, tokenizer
):
    async with serving(tokenizer, text_script(tokenizer, "x")) as server:
        actual = await send_for_prompt(
            server, prompt=ALPHABET, truncate_prompt_tokens=-1, **limits
        )
        assert actual == tokenizer.encode(ALPHABET)[-num_tokens:]


async def test_answer_that_never_fits_is_refused(tokenizer):
    async with serving(tokenizer) as server:
        limits = {"truncate_prompt_tokens": -1, "max_tokens": CONTEXT}
        error = await send_for_error(server, prompt=ALPHABET, **limits)
        assert (error["code"], error["param"]) == (
            "context_length_exceeded",
            "max_tokens",
        )
        for wrong in (0, -2, 1.5, "auto", True, 2**31):
            error = await send_for_error(
                server, prompt="a", truncate_prompt_tokens=wrong
            )
            assert error["param"] == "truncate_prompt_tokens"


async def test_truncation_preserves_the_tokenizer_prefix(tmp_path: Path) -> None:
    write_sentencepiece_style(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ready = replace(READY, max_model_len=4096, vocab_size=4096)
    async with serving(tokenizer, text_script(tokenizer, "x"), ready=ready) as server:
        before = tokenizer.encode("")
        whole_ids = tokenizer.encode("Hi Hi Hi Hi")
        assert (
            before
            and whole_ids[: len(before)] == before
            and len(whole_ids) > len(before) + 2
        )
        limit = len(before) + 2
        actual = await send_for_prompt(
            server, prompt="Hi Hi Hi Hi", truncate_prompt_tokens=limit
        )
        assert actual == [*before, *whole_ids[-2:]]
        actual = await send_for_prompt(
            server, prompt=whole_ids, truncate_prompt_tokens=limit
        )
        assert actual == whole_ids[-limit:]  # a client's token ids have no prefix


class _Counting(Tokenizer):
    """A tokenizer that counts the characters that it tokenizes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.__dict__ = {**tokenizer.__dict__}
        self.num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_only_the_end_of_a_long_text_is_tokenized(tokenizer):
    counting = _Counting(tokenizer)
    text = ALPHABET * 1000
    async with serving(counting, text_script(tokenizer, "x"), max_body=10**6) as server:
        counting.num_chars = 0
        actual = await send_for_prompt(server, prompt=text, truncate_prompt_tokens=7)
        assert actual == tokenizer.encode("tuvwxyz")
        messages = [{"role": "user", "content": text}]
        chat = {"messages": messages, "truncate_prompt_tokens": 5}
        assert await send_for_prompt(server, CHAT, **chat) == tokenizer.encode("wxyz;")
        assert counting.num_chars < len(text) / 10


async def test_echo_has_the_truncated_prompt(tokenizer):
    async with serving(tokenizer, text_script(tokenizer, "!")) as server:
        body = {"prompt": ALPHABET, "truncate_prompt_tokens": 3, "echo": True}
        answer = await server.http.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "xyz!"
        assert answer.json()["usage"]["prompt_tokens"] == 3


# -- truncation: auto ------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %};{% endfor %}"
)


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def call_and_output(number: int) -> list[dict[str, Any]]:
    call = {
        "type": "function_call",
        "call_id": f"c{number}",
        "name": "add",
        "arguments": "{}",
    }
    return [
        call,
        {"type": "function_call_output", "call_id": f"c{number}", "output": "o" * 9},
    ]


CONVERSATION = [
    message("user", "1" * 9),
    message("assistant", "2" * 9),
    message("user", "3" * 9),
]
LATER = [message("assistant", "4" * 9), message("user", "5" * 9)]


@pytest.mark.parametrize(
    ("items", "limit", "prompt"),
    [
        # Each turn has 11 tokens. The context has 64.
        (CONVERSATION, 31, "u111111111;a222222222;u333333333;"),
        (CONVERSATION, 32, "u333333333;"),
        (CONVERSATION + LATER, 31, "u333333333;a444444444;u555555555;"),
        (CONVERSATION + LATER, 32, "u555555555;"),
        ([message("system", "s"), *CONVERSATION], 31, "ss;u333333333;"),
        ([message("developer", "d"), *CONVERSATION, *LATER], 28,
         "sd;u333333333;a444444444;u555555555;"),
        # A result is kept only with its call. An answer is kept without its question
        # only if both do not fit.
        ([*CONVERSATION[:1], *call_and_output(1), *LATER[1:]], 40, "u555555555;"),
        ([*CONVERSATION[:1], *call_and_output(1)], 35, "u111111111;a<add>;tooooooooo;"),
        ([*CONVERSATION[:1], *call_and_output(1), *call_and_output(2)], 40,
         "a<add>;tooooooooo;"),
        ([*CONVERSATION[:1], *call_and_output(1), *call_and_output(2)], 20,
         "a<add>;tooooooooo;a<add>;tooooooooo;"),
        ("x" * 9, 50, "uxxxxxxxxx;"),
    ],
)  # fmt: skip
async def test_oldest_items_are_dropped_until_the_rest_fits(
    items, limit, prompt, tokenizer
):
    templated = with_template(tokenizer, TEMPLATE + "{# tools #}")
    body = {
        "input": items,
        "max_output_tokens": limit,
        "truncation": "auto",
        "tools": [FLAT],
    }
    async with serving(templated, text_script(templated, "x")) as server:
        assert (
            templated.decode(await send_for_prompt(server, RESPONSES, **body)) == prompt
        )
        response = (await server.http.post(RESPONSES, json=body)).json()
        assert response["truncation"] == "auto"


async def test_first_items_that_the_template_refuses_are_dropped(tokenizer):
    refuses = (
        "{% if messages[0].role != 'user' %}"
        "{{ raise_exception('user first') }}{% endif %}"
    )
    templated = with_template(tokenizer, refuses + TEMPLATE + "{# tools #}")
    items = [
        *CONVERSATION,
        *call_and_output(1),
        *call_and_output(2),
        *call_and_output(3),
    ]
    body = {"input": items, "truncation": "auto"}
    async with serving(
        templated, text_script(templated, "x"), ready=READY_4K
    ) as server:
        actual = await send_for_prompt(
            server, RESPONSES, **body, truncate_prompt_tokens=65
        )
        assert templated.decode(actual) == "u333333333;" + "a<add>;tooooooooo;" * 3
        error = await send_for_error(
            server, RESPONSES, **body, truncate_prompt_tokens=64
        )
        assert "user first" in error["message"]


async def test_instructions_are_never_truncated(tokenizer):
    templated = with_template(tokenizer, TEMPLATE)
    body = {
        "instructions": "Be kind",
        "input": [*CONVERSATION, *LATER],
        "truncation": "auto",
    }
    async with serving(templated, text_script(templated, "x")) as server:
        actual = await send_for_prompt(server, RESPONSES, **body, max_output_tokens=30)
        assert templated.decode(actual) == "sBe kind;u555555555;"


async def test_truncation_leaves_space_for_an_answer(tokenizer):
    templated = with_template(tokenizer, TEMPLATE)
    body = {"input": [*CONVERSATION, *LATER], "truncation": "auto"}
    async with serving(templated, text_script(templated, "x")) as server:
        actual = await send_for_prompt(server, RESPONSES, **body)
        assert len(actual) == 33 <= CONTEXT - CONTEXT // 4
        # A last item that fits the context is served without truncation.
        actual = await send_for_prompt(
            server, RESPONSES, input="x" * (CONTEXT - 4), truncation="auto"
        )
        assert len(actual) == CONTEXT - 2


async def test_last_item_that_does_not_fit_is_refused(tokenizer):
    templated = with_template(tokenizer, TEMPLATE)
    items = [*CONVERSATION, message("user", "x" * 100)]
    async with serving(templated, text_script(templated, "x")) as server:
        error = await send_for_error(server, RESPONSES, input=items, truncation="auto")
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        # By default, nothing is truncated.
        error = await send_for_error(server, RESPONSES, input=CONVERSATION * 9)
        assert error["code"] == "context_length_exceeded"
        error = await send_for_error(server, RESPONSES, input="a", truncation="middle")
        assert error["param"] == "truncation"


async def test_conversation_may_be_many_times_as_long_as_the_context(tokenizer):
    templated = with_template(tokenizer, TEMPLATE)
    items = [message("user", f"{number:09}") for number in range(5000)]
    body = {"input": items, "truncation": "auto", "truncate_prompt_tokens": 44}
    async with serving(
        templated, text_script(templated, "x"), max_body=10**6
    ) as server:
        actual = templated.decode(await send_for_prompt(server, RESPONSES, **body))
        assert actual == "".join(f"u{number:09};" for number in range(4996, 5000))
