"""Answers of lm_eval's documents are compared exactly, and differences named; what lm_eval's two
backends are told alike."""

import math
import shutil
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from benchmarks.evaluate import (
    Answer,
    Document,
    TaskAnswers,
    adds_bos,
    compare,
    compare_scores,
    documents_of,
    load,
    save,
    table,
)
from tests.e2e.lm_eval_tasks.wikitext import articles
from tests.make_models import ensure_model


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
def test_an_answer_is_the_same_or_named(expected, got, differs):
    result = compare(_task(["x"], [expected]), _task(["x"], [got]), 1e-3)
    assert (result["requests"], result["differing_documents"]) == (2, differs)
    assert [told[:10] for told in result["differences"]] == ["document 1"] * differs


def test_a_document_with_two_differing_requests_counts_once():
    result = compare(_task(["a", "b", "c"]), _task(["a", "x", "y"]), 1e-3)
    assert result["differing_documents"] == 1
    first, second = result["differences"]
    assert first == "document 0, request 1: 'b', got 'x'" and "request 2" in second


@pytest.mark.parametrize(
    "other", [_task(["a"]), _task(["a"], ["b"], prompt="q"), _task(["a"], ["b", "c"])]
)
def test_answers_to_other_documents_are_refused(other):
    with pytest.raises(ValueError, match="document"):
        compare(_task(["a"], ["b"]), other, 1e-3)


def test_a_document_seen_through_two_filters_is_one():
    def sample(doc_id: int, name: str) -> dict[str, Any]:
        arguments = [("context", " yes"), ("context", " no")]
        resps = [[(-1.0, True)], [(-2.0, False)]]
        sample = {
            "doc_id": doc_id,
            "arguments": arguments,
            "resps": resps,
            "filter": name,
        }
        return {
            **sample,
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


def test_scores_are_compared_document_by_document_with_two_standard_errors():
    def task(*scores: float) -> TaskAnswers:
        documents = [
            Document(i, [["p"]], ["x"], {"acc": s}) for i, s in enumerate(scores)
        ]
        return TaskAnswers(documents, {"acc": sum(scores) / len(scores), "whole": 3.0})

    half = [0.0, 1.0] * 50
    lost_one = [0.0, 0.0, *half[2:]]  # 0.01, standard error 0.01
    assert compare_scores(task(*half), task(*half), 0.0)["differences"] == []
    found = compare_scores(task(*half), task(*lost_one), 0.031)
    assert found == {
        "score_differences": {"acc": pytest.approx((-0.01, 0.01))},
        "differences": [],
    }
    (told,) = compare_scores(task(*half), task(*lost_one), 0.029)["differences"]
    assert told == "acc differs by -0.0100, standard error 0.0100"
    # One document proves nothing, and perplexities are told alone.
    assert len(compare_scores(task(1.0), task(1.0), 0.5)["differences"]) == 1
    assert compare_scores(task(-2.5, -3.5), task(-9.0, -4.0), 0.1)["differences"] == []


def test_saved_answers_come_back_and_know_their_settings(tmp_path):
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


def test_the_table_has_a_row_per_task():
    reference = {"scored": _task([(-1.5, True)]), "text": _task(["x"])}
    got = {
        "scored": _task([(-1.75, True)]),
        "text": _task(["x"]),
        "alone": _task(["x"]),
    }
    tasks = {
        name: {"documents": 1, "metrics": task.metrics} for name, task in got.items()
    }
    for name, task in reference.items():
        tasks[name] |= compare(task, got[name], 1e-3)
    _, _, *rows = table(tasks).splitlines()
    assert rows == [
        "| scored | 1 | acc 0.5 | acc 0.5 | 1 | 2.5e-01 |",
        "| text | 1 | acc 0.5 | acc 0.5 | 0 |  |",
        "| alone | 1 | acc 0.5 |  |  |  |",
    ]


def test_a_text_is_split_at_the_titles_of_articles():
    text = " \n = One = \n \n Text = of one . \n = = Section = = \n \n More . \n = Two = \n \n Text ."
    first, second = articles(text)
    assert first.startswith(" = One = \n") and first.endswith("More . \n")
    assert second == " = Two = \n \n Text ."


def test_whether_texts_begin_with_a_token_of_the_tokenizers_own(tmp_path):
    model = ensure_model("gqa")
    assert not adds_bos(model)
    for file in model.glob("*.json"):
        shutil.copy(file, tmp_path)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    first = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, 0)]
    )
    tokenizer.save(path)
    assert adds_bos(tmp_path)
