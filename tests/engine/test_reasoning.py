"""Reasoning is separated from the answer, in whatever pieces the text arrives."""

from typing import Any

import pytest

from engine.text.reasoning import ReasoningParser
from engine.text.tool_formats import CallOpenings
from protocol.openai.tools import Tools

CASES: list[tuple[Any, str, str, str]] = [
    (
        "perhaps",
        "<think>\nI add.\n\n1\n</think>\n\n2 </think>",
        "I add.\n\n1",
        "2 </think>",
    ),
    ("perhaps", "\n <think>hm</think>2", "hm", "2"),
    ("perhaps", " 2 <think>x</think>", "", " 2 <think>x</think>"),
    ("perhaps", "<think>\n\n</think>\n\nYes", "", "Yes"),
    ("perhaps", "<think>cut < </thi", "cut < </thi", ""),
    ("perhaps", "<think>cut \n ", "cut", ""),
    ("perhaps", "\n <thi", "", "\n <thi"),
    ("perhaps", "", "", ""),
    ("open", "I add </thinks>.\n</think>\n", "I add </thinks>.", ""),
    ("open", "<think>once more</think> 2 ", "once more", "2 "),
    ("open", " no end", "no end", ""),
    ("open", "<thi</think>2", "<thi", "2"),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_reasoning_is_separated_in_any_pieces(start, text, reasoning, content):
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(len(text)))]
    cuts += [[text[:i], *text[i:]] for i in range(len(text))]
    for pieces in cuts:
        parser = ReasoningParser(start)
        results = [*map(parser.feed, pieces), parser.finish()]
        assert ["".join(parts) for parts in zip(*results, strict=True)] == [
            reasoning,
            content,
        ], pieces
        assert (
            parser.is_over == (start == "perhaps" or "</think>" in text) or not content
        )


def test_reasoning_is_streamed_and_blanks_are_scanned_once():
    parser = ReasoningParser("open")
    assert [parser.feed(text) for text in ("I ", "add", " 1</", "b>")] == [
        ("I", ""), (" add", ""), (" 1", ""), ("</b>", "")]  # fmt: skip
    for _ in range(400_000):
        assert parser.feed(" ") == ("", "")
    assert parser.feed("x") == (" " * 400_000 + "x", "")


# -- calls in reasoning that is never closed -------------------------------------------

TOOLS = tuple(
    {"type": "function", "function": {"name": name}} for name in ("add", "look_up")
)
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QWEN = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "</function>\n</tool_call>"
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
CALLS = [
    ("hermes", HERMES),
    ("hermes", HERMES + HERMES + " and more"),
    ("hermes", '<tool_call>{"arguments": {}, "name": "look_up"}'),
    ("hermes", '<tool_call> { "name" : "add", "arg'),
    ("qwen3_coder", QWEN),
    ("qwen3_coder", "<function=look_up></function>"),
    (
        "glm45",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    ("glm45", "<tool_call>look_up\n</tool_call>"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{}"),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {}}'),
    ("pythonic", "<|python_start|>[add(a=1)]<|python_end|>"),
]
NO_CALLS = [
    ("hermes", "I write <tool_call> and </tool_call> <tool_"),
    ("hermes", 'such as <tool_call>{"name": <its name>, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "ad'),
    ("hermes", "<tool_call>" + " " * 600 + '{"name": "add"'),
    ("qwen3_coder", "<function=other></function> <function=add"),
    ("glm45", "<tool_call>add is what I write"),
    ("llama3_json", '{"name": "add", "parameters": {}}'),
    ("pythonic", "[add(a=1)]"),
]


def cuts_of(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


def read(
    call_format: str,
    pieces: list[str],
    *,
    mode: Any = "auto",
    is_truncated: bool = False,
) -> list[str]:
    """Return the reasoning and the answer."""
    parser = ReasoningParser(
        "perhaps", CallOpenings(Tools(TOOLS, mode, "add"), call_format)
    )
    results = [*map(parser.feed, pieces), parser.finish(is_truncated=is_truncated)]
    return ["".join(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize(("call_format", "call"), CALLS)
def test_call_ends_reasoning_that_is_never_closed(call_format, call):
    for pieces in cuts_of(f"<think>\nI < add.\n{call}"):
        assert read(call_format, pieces) == ["I < add.", call], pieces


@pytest.mark.parametrize(("call_format", "text"), NO_CALLS)
def test_text_that_resembles_a_call_is_reasoning(call_format, text):
    for pieces in cuts_of(f"<think>\n{text}"):
        assert read(call_format, pieces) == [text, ""], pieces


@pytest.mark.parametrize(("call_format", "call"), CALLS)
def test_call_within_closed_reasoning_is_reasoning(call_format, call):
    for pieces in cuts_of(f"<think>{call} or not?</think>\n\nYes {call}"):
        assert read(call_format, pieces) == [f"{call} or not?", f"Yes {call}"], pieces


def test_reasoning_cut_by_a_limit_includes_the_call():
    for pieces in cuts_of(f"<think>hm {HERMES} or"):
        assert read("hermes", pieces, is_truncated=True) == [f"hm {HERMES} or", ""]


@pytest.mark.parametrize("mode", ["none", "required", "named"])
def test_call_does_not_end_the_reasoning_if_the_model_may_not_call(mode):
    assert read("hermes", [f"<think>hm {HERMES}"], mode=mode) == [f"hm {HERMES}", ""]


def test_text_after_a_call_is_held_and_scanned_once():
    parser = ReasoningParser("open", CallOpenings(Tools(TOOLS, "auto")))
    assert parser.feed("I see <tool") == ("I see", "")
    assert parser.feed("box> ") == (" <toolbox>", "")
    assert parser.feed(HERMES) == ("", "") and parser.holds_text_back
    for _ in range(200_000):
        assert parser.feed("x </") == ("", "")
    reasoning, answer = parser.feed("think> so")
    assert reasoning.startswith(f" {HERMES}x </x") and answer == "so"
