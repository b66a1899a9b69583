"""Answers of lm_eval's documents: kept in a file, compared one by one, shown as a table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

# A generated text; a loglikelihood (nats) and whether it is the greedy continuation; the
# loglikelihood of a whole document.
Answer = str | tuple[float, bool] | float
DIFFERENT_LINES = 20  # of differing documents that are shown


@dataclass(frozen=True)
class Document:
    """One document's requests, in order, and what was answered to each."""

    doc_id: int
    requests: list[list[str]]  # [prompt] or [context, continuation]
    answers: list[Answer]


@dataclass(frozen=True)
class TaskAnswers:
    """One task's documents by id, and the metrics lm_eval makes of them."""

    documents: list[Document]
    metrics: dict[str, float]
    seconds: float = 0.0


@dataclass(frozen=True)
class Difference:
    """A request that was answered otherwise than by the reference."""

    doc_id: int
    index: int  # among the document's requests
    expected: Answer
    got: Answer

    def __str__(self) -> str:
        return f"document {self.doc_id}, request {self.index}: {self.expected!r}, got {self.got!r}"


@dataclass
class Comparison:
    """How one task's answers differ from the reference's."""

    num_documents: int = 0
    num_requests: int = 0
    worst: float = 0.0  # largest difference of loglikelihoods (nats)
    different: list[Difference] = field(default_factory=list)

    @property
    def num_different(self) -> int:
        """Documents with at least one differing answer."""
        return len({difference.doc_id for difference in self.different})


def documents_of(samples: Sequence[Mapping[str, Any]]) -> list[Document]:
    """Reads lm_eval's samples, which hold a document once for each of a task's filters."""
    found: dict[int, Document] = {}
    for sample in samples:
        requests = [
            [a for a in arguments if isinstance(a, str)] for arguments in sample["arguments"]
        ]
        answers = [_answer(responses[0]) for responses in sample["resps"]]
        found[sample["doc_id"]] = Document(sample["doc_id"], requests, answers)
    return [found[doc_id] for doc_id in sorted(found)]


def _answer(given: Any) -> Answer:
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence):
        loglikelihood, is_greedy = given
        return float(loglikelihood), bool(is_greedy)
    return float(given)


def compare(
    reference: TaskAnswers, got: TaskAnswers, tolerance: float, *, same_prompts: bool = True
) -> Comparison:
    """Compares document by document: texts and greediness exactly, loglikelihoods to `tolerance`.

    Args:
        same_prompts: whether both were asked in the same words, as they are unless one of them
            applies the chat template itself.

    Raises:
        ValueError: these are not answers to the same documents.
    """
    result = Comparison()
    ids = [[document.doc_id for document in side.documents] for side in (reference, got)]
    if ids[0] != ids[1]:
        raise ValueError(f"the reference answered documents {ids[0]}, not {ids[1]}")
    for expected, answered in zip(reference.documents, got.documents, strict=True):
        if same_prompts and expected.requests != answered.requests:
            raise ValueError(f"document {expected.doc_id} was asked in other words")
        result.num_documents += 1
        if len(expected.answers) != len(answered.answers):
            raise ValueError(f"document {expected.doc_id} has another number of requests")
        pairs = zip(expected.answers, answered.answers, strict=True)
        for index, (want, have) in enumerate(pairs):
            result.num_requests += 1
            gap = _gap(want, have)
            result.worst = max(result.worst, gap if math.isfinite(gap) else 0.0)
            if not gap <= tolerance:  # NaN is no answer
                result.different.append(Difference(expected.doc_id, index, want, have))
    return result


def _gap(want: Answer, have: Answer) -> float:
    """The difference of two loglikelihoods; 0 or infinity for what is the same or is not."""
    if isinstance(want, float) and isinstance(have, float):
        return abs(want - have)
    if isinstance(want, tuple) and isinstance(have, tuple):
        return abs(want[0] - have[0]) if want[1] == have[1] else math.inf
    if isinstance(want, str) and isinstance(have, str):
        # hf decodes an output by itself, where SentencePiece loses the space between prompt and it
        return 0.0 if want in (have, have.removeprefix(" ")) else math.inf
    return 0.0 if want == have else math.inf


def save(path: Path, settings: Mapping[str, Any], tasks: Mapping[str, TaskAnswers]) -> None:
    """Writes answers with the settings they were got with, as JSON."""
    content = {"settings": dict(settings), "tasks": {n: asdict(t) for n, t in tasks.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def load(path: Path, settings: Mapping[str, Any]) -> dict[str, TaskAnswers]:
    """Reads what `save` wrote.

    Raises:
        ValueError: it was got with other settings.
    """
    content = json.loads(path.read_text())
    for name, value in settings.items():
        if (found := content["settings"].get(name)) != value:
            raise ValueError(
                f"{path} was made with {name} = {found!r}, not {value!r}; make it again"
            )
    return msgspec.convert(content["tasks"], dict[str, TaskAnswers])


def table(
    got: Mapping[str, TaskAnswers],
    reference: Mapping[str, TaskAnswers],
    comparisons: Mapping[str, Comparison],
) -> str:
    """A markdown table, a row per task; the reference's columns are empty where it was not run."""
    rows = [
        "| task | documents | metrics (endpoint) | metrics (hf) | differing | max. difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, task in got.items():
        compared = comparisons.get(name)
        cells = [name, str(len(task.documents)), _metrics(task.metrics)]
        cells.append(_metrics(reference[name].metrics) if name in reference else "")
        cells.append(str(compared.num_different) if compared else "")
        scored = task.documents and not isinstance(task.documents[0].answers[0], str)
        cells.append(f"{compared.worst:.1e}" if compared and scored else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
