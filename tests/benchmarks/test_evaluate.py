"""benchmarks/evaluate.py compares lm_eval's answers exactly and reports every
difference.

It requires that both backends of lm_eval get the same prompts.
"""

import math
import shutil
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from benchmarks.answers import (
    Answer,
    Document,
    TaskAnswers,
    compare,
    compare_scores,
    documents_of,
    load,
    save,
    table,
)
from benchmarks.evaluate import adds_bos
from tests.e2e.lm_eval_tasks.wikitext import articles
from tests.make_models import ensure_model


def _task(*answers: list[Answer], prompt: str = "p") -> TaskAnswers:
    """Returns a task with one document for each list of answers."""
    documents = [
        Document(doc_id, [[prompt]] * len(document_answers), document_answers)
        for doc_id, document_answers in enumerate(answers)
    ]
    return TaskAnswers(documents, {"acc": 0.5})


@pytest.mark.parametrize(
    ("expected", "measured", "differs"),
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
def test_different_answer_is_counted_and_named(expected, measured, differs):
    result = compare(_task(["x"], [expected]), _task(["x"], [measured]), 1e-3)
    assert result["requests"] == 2
    assert result["differing_documents"] == int(differs)
    documents = [difference[:10] for difference in result["differences"]]
    assert documents == (["document 1"] if differs else [])


def test_document_with_two_different_answers_counts_once():
    result = compare(_task(["a", "b", "c"]), _task(["a", "x", "y"]), 1e-3)
    assert result["differing_documents"] == 1
    first, second = result["differences"]
    assert first == "document 0, request 1: 'b', got 'x'"
    assert "request 2" in second


@pytest.mark.parametrize(
    "other", [_task(["a"]), _task(["a"], ["b"], prompt="q"), _task(["a"], ["b", "c"])]
)
def test_answers_to_different_documents_are_refused(other):
    with pytest.raises(ValueError, match="document"):
        compare(_task(["a"], ["b"]), other, 1e-3)


def test_samples_of_two_filters_become_one_document():
    def sample(doc_id: int, name: str) -> dict[str, Any]:
        arguments = [("context", " yes"), ("context", " no")]
        resps = [[(-1.0, True)], [(-2.0, False)]]
        return {
            "doc_id": doc_id,
            "arguments": arguments,
            "resps": resps,
            "filter": name,
            "metrics": ["acc", "words"],
            "acc": doc_id,
            "words": (-3.0, 2),
        }

    samples = [sample(1, "strict"), sample(0, "strict"), sample(1, "flexible")]
    documents = documents_of(samples)
    assert [document.doc_id for document in documents] == [0, 1]
    assert documents[0].requests == [["context", " yes"], ["context", " no"]]
    assert documents[0].answers == [(-1.0, True), (-2.0, False)]
    assert documents[0].scores == {"acc,strict": 0}
    assert documents[1].scores == {"acc,strict": 1, "acc,flexible": 1}


def _scored_task(*scores: float) -> TaskAnswers:
    """Returns a task with one document for each score, and a metric for the task."""
    documents = [
        Document(doc_id, [["p"]], ["x"], {"acc": score})
        for doc_id, score in enumerate(scores)
    ]
    return TaskAnswers(documents, {"acc": sum(scores) / len(scores), "whole": 3.0})


def test_scores_are_compared_by_document_with_two_standard_errors():
    task = _scored_task
    half = [0.0, 1.0] * 50
    # The mean difference is 0.01, and its standard error too.
    lost_one = [0.0, 0.0, *half[2:]]
    assert compare_scores(task(*half), task(*half), 0.0)["differences"] == []
    result = compare_scores(task(*half), task(*lost_one), 0.031)
    assert result == {
        "score_differences": {"acc": pytest.approx((-0.01, 0.01))},
        "differences": [],
    }
    result = compare_scores(task(*half), task(*lost_one), 0.029)
    assert result["differences"] == ["acc differs by -0.0100, standard error 0.0100"]


def test_one_document_is_not_enough_to_compare_accuracies():
    task = _scored_task(1.0)
    assert len(compare_scores(task, task, 0.5)["differences"]) == 1


def test_scores_other_than_accuracies_are_reported_but_not_checked():
    reference = _scored_task(-2.5, -3.5)
    result = compare_scores(reference, _scored_task(-9.0, -4.0), 0.1)
    assert result["differences"] == []


def test_saved_answers_load_only_with_the_same_settings(tmp_path):
    tasks = {
        "one": _task(["text"], ["other"]),
        "two": _task([(-1.5, True), (-3.0, False)]),
    }
    tasks["three"] = _task([-812.25])
    path = tmp_path / "folder" / "answers.json"
    save(path, {"limit": 3}, tasks)
    assert load(path, {"limit": 3}) == tasks
    with pytest.raises(ValueError, match="limit = 3, not 4"):
        load(path, {"limit": 4})


def test_table_has_a_row_per_task():
    reference = {"scored": _task([(-1.5, True)]), "text": _task(["x"])}
    measured = {
        "scored": _task([(-1.75, True)]),
        "text": _task(["x"]),
        "no reference": _task(["x"]),
    }
    tasks = {
        name: {"documents": 1, "metrics": task.metrics}
        for name, task in measured.items()
    }
    for name, task in reference.items():
        tasks[name] |= compare(task, measured[name], 1e-3)
    _, _, *rows = table(tasks).splitlines()
    assert rows == [
        "| scored | 1 | acc 0.5 | acc 0.5 | 1 | 2.5e-01 |",
        "| text | 1 | acc 0.5 | acc 0.5 | 0 |  |",
        "| no reference | 1 | acc 0.5 |  |  |  |",
    ]


def test_wikitext_is_split_at_the_titles_of_articles():
    text = (
        " \n = One = \n \n Text = of one . \n = = Section = = \n \n More . \n"
        " = Two = \n \n Text ."
    )
    first, second = articles(text)
    assert first.startswith(" = One = \n")
    assert first.endswith("More . \n")
    assert second == " = Two = \n \n Text ."


def test_tokenizer_that_adds_a_first_token_is_detected(tmp_path):
    model = ensure_model("gqa")
    assert not adds_bos(model)
    for file in model.glob("*.json"):
        shutil.copy(file, tmp_path)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    token = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, 0)]
    )
    tokenizer.save(path)
    assert adds_bos(tmp_path)
