"""Answers of lm_eval's documents are compared exactly, and differences named."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.eval_answers import (
    Answer,
    Document,
    TaskAnswers,
    compare,
    documents_of,
    load,
    save,
    table,
)
from benchmarks.eval_tasks.wikitext import articles


def _task(*answers: list[Answer], prompt: str = "p") -> TaskAnswers:
    documents = [Document(i, [[prompt]] * len(a), a) for i, a in enumerate(answers)]
    return TaskAnswers(documents, {"acc": 0.5})


@pytest.mark.parametrize(
    ("expected", "got", "differs"),
    [
        ("a text", "a text", False),
        ("a text", "a text ", True),
        ("a text", " a text", False),
        ("a text", "  a text", True),
        (" a text", "a text", True),
        ((-2.5, True), (-2.5005, True), False),
        ((-2.5, True), (-2.5, False), True),
        ((-2.5, True), (-2.502, True), True),
        (-900.0, -900.0009, False),
        (-900.0, -900.002, True),
        (-900.0, math.nan, True),
        ("-900.0", -900.0, True),
    ],
)
def test_an_answer_is_the_same_or_named(expected: Answer, got: Answer, differs: bool) -> None:
    result = compare(_task(["x"], [expected]), _task(["x"], [got]), 1e-3)
    assert (result.num_documents, result.num_requests) == (2, 2)
    assert result.num_different == differs
    assert [difference.doc_id for difference in result.different] == [1] * differs


def test_a_document_with_two_differing_requests_counts_once() -> None:
    result = compare(_task(["a", "b", "c"]), _task(["a", "x", "y"]), 1e-3)
    assert result.num_different == 1
    assert [difference.index for difference in result.different] == [1, 2]
    assert "document 0, request 1: 'b', got 'x'" in str(result.different[0])


@pytest.mark.parametrize(
    "other", [_task(["a"]), _task(["a"], ["b"], prompt="q"), _task(["a"], ["b", "c"])]
)
def test_answers_to_other_documents_are_refused(other: TaskAnswers) -> None:
    with pytest.raises(ValueError, match="document"):
        compare(_task(["a"], ["b"]), other, 1e-3)


def test_a_document_seen_through_two_filters_is_one() -> None:
    def sample(doc_id: int, name: str) -> dict[str, Any]:
        arguments = [("context", " yes"), ("context", " no")]
        resps = [[(-1.0, True)], [(-2.0, False)]]
        return {"doc_id": doc_id, "arguments": arguments, "resps": resps, "filter": name}

    samples = [sample(1, "strict"), sample(0, "strict"), sample(1, "flexible")]
    documents = documents_of(samples)
    assert [document.doc_id for document in documents] == [0, 1]
    assert documents[0].requests == [["context", " yes"], ["context", " no"]]
    assert documents[0].answers == [(-1.0, True), (-2.0, False)]


def test_saved_answers_come_back_and_know_their_settings(tmp_path: Path) -> None:
    tasks = {"one": _task(["text"], ["other"]), "two": _task([(-1.5, True), (-3.0, False)])}
    tasks["three"] = _task([-812.25])
    path = tmp_path / "folder" / "answers.json"
    save(path, {"limit": 3}, tasks)
    assert load(path, {"limit": 3}) == tasks
    with pytest.raises(ValueError, match="limit = 3, not 4"):
        load(path, {"limit": 4})


def test_the_table_has_a_row_per_task() -> None:
    scored, text = _task([(-1.5, True)]), _task(["x"])
    got = {"scored": _task([(-1.75, True)]), "text": text, "alone": text}
    reference = {"scored": scored, "text": text}
    comparisons = {name: compare(task, got[name], 1e-3) for name, task in reference.items()}
    _, _, *rows = table(got, reference, comparisons).splitlines()
    assert rows == [
        "| scored | 1 | acc 0.5 | acc 0.5 | 1 | 2.5e-01 |",
        "| text | 1 | acc 0.5 | acc 0.5 | 0 |  |",
        "| alone | 1 | acc 0.5 |  |  |  |",
    ]


def test_a_text_is_split_at_the_titles_of_articles() -> None:
    text = (
        " \n = One = \n \n Text = of one . \n = = Section = = \n \n More . \n = Two = \n \n Text ."
    )
    first, second = articles(text)
    assert first.startswith(" = One = \n") and first.endswith("More . \n")
    assert second == " = Two = \n \n Text ."
