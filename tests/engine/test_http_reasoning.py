"""Reasoning over HTTP, together with tools, grammars, stop strings and choices."""

import pytest

from protocol.messages import Grammar
from tests.engine.test_http_tools import CALL, TOOL, call_of, reasoning_and_content
from tests.rigs.http_server import (
    chunks,
    end,
    scripted,
    serving_4k,
    text_script,
    with_template,
)

TAGS = "{# <think></think> #}{{ tools or '' }}Say: "
OPEN = (
    TAGS
    + "{% if thinking is not false %}<think>\n{% else %}<think></think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "text", "request_fields", "expected", "num_reasoning"),
    [
        (TAGS, "<think>\nI <b>.\n</think>\n\nYo", {}, ("I <b>.", "Yo"), 17),
        (TAGS, "Yo", {}, (None, "Yo"), 0),
        (OPEN, "I <b>.\n</think>\nYo", {}, ("I <b>.", "Yo"), 15),
        (OPEN, "Yo</think>", {"reasoning_effort": "none"}, (None, "Yo</think>"), 0),
        (OPEN, "for ever", {}, ("for ever", ""), 8),
        (OPEN, "I.</think>Yo", {"include_reasoning": False}, (None, "Yo"), 10),
        (OPEN, "I say.</think>Yo ENDo", {"stop": ["END"]}, ("I say.", "Yo "), 14),
        (OPEN, "I END.</think>Yo", {"stop": ["END"]}, ("I", ""), 5),
        (OPEN, "I.</think>Yo",
         {"messages": [{"role": "user", "content": "Hi"},
                       {"role": "assistant", "content": "<think>So"}],
          "continue_final_message": True}, ("I.", "Yo"), 10),
        ("no tags", "<think>I</think>Yo", {}, (None, "<think>I</think>Yo"), 0),
    ],
)  # fmt: skip
async def test_reasoning_is_separated_from_the_answer(
    tokenizer, template, text, request_fields, expected, num_reasoning
):
    if "continue_final_message" in request_fields:
        template += "{{ messages[-1].content }}"
    templated = with_template(tokenizer, template)
    async with serving_4k(
        templated, text_script(templated, text, finish_reason="stop")
    ) as server:
        answer = (await server.chat(logprobs=False, **request_fields)).json()
        assert reasoning_and_content(answer["choices"][0]) == expected
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == num_reasoning
        streamed = chunks(
            await server.chat(
                stream=True, stream_options={"include_usage": True}, **request_fields
            )
        )
        deltas = [
            chunk["choices"][0]["delta"] for chunk in streamed if chunk["choices"]
        ]
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        assert (reasoning or None, content) == expected
        assert streamed[-1]["usage"]["completion_tokens_details"] == details


async def test_calls_are_read_only_after_the_reasoning(tokenizer):
    """Text within the reasoning is never a call, even if a call is required."""
    templated = with_template(tokenizer, OPEN)
    text = f"Perhaps {CALL}.</think>\n{CALL}"
    async with serving_4k(
        templated, text_script(templated, text, finish_reason="stop")
    ) as server:
        answer = (await server.chat(tools=[TOOL])).json()
        assert call_of(answer["choices"][0]) == ("add", '{"a": 1}')
        assert reasoning_and_content(answer["choices"][0])[0] == f"Perhaps {CALL}."
    named = {"type": "function", "function": {"name": "add"}}
    for text, calls in (("I", []), ('I</think>\n{"a": 1}', [("add", '{"a": 1}')])):
        async with serving_4k(
            templated, text_script(templated, text, finish_reason="stop")
        ) as server:
            answer = (await server.chat(tools=[TOOL], tool_choice=named)).json()
            assert reasoning_and_content(answer["choices"][0])[0] == "I"
            actual = answer["choices"][0]["message"].get("tool_calls", [])
            functions = [call["function"] for call in actual]
            names_and_arguments = [
                (function["name"], function["arguments"]) for function in functions
            ]
            assert names_and_arguments == calls


@pytest.mark.parametrize(
    ("text", "reason", "expected", "arguments", "num_reasoning"),
    [
        (f"I add.\n{CALL}", "stop", ("I add.", "tool_calls"), ['{"a": 1}'], 7),
        (
            f"I add.\n{CALL}\n{CALL}",
            "stop",
            ("I add.", "tool_calls"),
            ['{"a": 1}'] * 2,
            7,
        ),
        (CALL, "stop", (None, "tool_calls"), ['{"a": 1}'], 0),
        (f"I {CALL[:-14]}", "stop", ("I", "stop"), ['{"a": 1'], 2),
        (f"I {CALL}", "length", (f"I {CALL}", "length"), [], 2 + len(CALL)),
    ],
)
async def test_call_ends_reasoning_that_is_never_closed(
    tokenizer, text, reason, expected, arguments, num_reasoning
):
    templated = with_template(tokenizer, OPEN)
    async with serving_4k(
        templated, text_script(templated, text, finish_reason=reason)
    ) as server:
        answer = (await server.chat(tools=[TOOL], max_tokens=200)).json()
        (choice,) = answer["choices"]
        assert (reasoning_and_content(choice)[0], choice["finish_reason"]) == expected
        calls = choice["message"].get("tool_calls", [])
        assert [call["function"]["arguments"] for call in calls] == arguments
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == num_reasoning
        streamed = chunks(await server.chat(tools=[TOOL], max_tokens=200, stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (
            expected[0] or ""
        )
        pieces = [
            call["function"] for delta in deltas for call in delta.get("tool_calls", [])
        ]
        assert "".join(piece["arguments"] for piece in pieces) == "".join(arguments)
        assert [piece["name"] for piece in pieces if "name" in piece] == ["add"] * len(
            arguments
        )
        assert streamed[-1]["choices"][0]["finish_reason"] == expected[1]


async def test_grammar_applies_after_the_reasoning(tokenizer):
    request = {"structured_outputs": {"regex": "a+"}}
    for template, reasoning_start in ((TAGS, "perhaps"), (OPEN, "open"), ("plain", "")):
        templated = with_template(tokenizer, template)
        async with serving_4k(templated, text_script(templated, "x")) as server:
            await server.chat(**request)
            (add,) = server.engine.added
            assert add.sampling.grammar == Grammar(
                "regex", "a+", reasoning=reasoning_start
            )  # type: ignore[arg-type]


async def test_each_choice_has_separate_reasoning(tokenizer):
    templated = with_template(tokenizer, OPEN)
    ids = [templated.encode(text) for text in ("I</think>a", "We</think>b")]
    script = scripted(
        *({"choice": choice, "token_ids": ids[choice]} for choice in (1, 0)),
        end(0),
        end(1),
    )
    async with serving_4k(templated, script) as server:
        choices = (await server.chat(n=2)).json()["choices"]
        assert [reasoning_and_content(choice) for choice in choices] == [
            ("I", "a"),
            ("We", "b"),
        ]
