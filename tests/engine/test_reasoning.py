"""Reasoning before an answer, however its text is cut into pieces."""

from typing import Any

import pytest

from engine.text.reasoning import ReasoningParser

CASES: list[tuple[Any, str, str, str]] = [
    ("perhaps", "<think>\nI add.\n\n1\n</think>\n\n2 </think>", "I add.\n\n1", "2 </think>"),
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


@pytest.mark.parametrize(("begins", "text", "reasoning", "content"), CASES)
def test_an_answer_is_told_from_its_reasoning_however_it_is_cut(begins, text, reasoning, content):
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(len(text)))]
    cuts += [[text[:at], *text[at:]] for at in range(len(text))]
    for pieces in cuts:
        parser = ReasoningParser(begins)
        told = [*map(parser.feed, pieces), parser.finish()]
        assert ["".join(parts) for parts in zip(*told, strict=True)] == [reasoning, content], pieces
        assert parser.is_over == (begins == "perhaps" or "</think>" in text) or not content


def test_reasoning_comes_as_it_is_thought_and_blanks_are_looked_at_once():
    parser = ReasoningParser("open")
    assert [parser.feed(text) for text in ("I ", "add", " 1</", "b>")] == [
        ("I", ""), (" add", ""), (" 1", ""), ("</b>", "")]  # fmt: skip
    for _ in range(400_000):
        assert parser.feed(" ") == ("", "")
    assert parser.feed("x") == (" " * 400_000 + "x", "")
