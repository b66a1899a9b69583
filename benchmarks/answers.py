"""Compares, saves and shows the answers to lm_eval's tasks."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

# An answer has one of three forms: (str) a generated text; (tuple) a continuation's
# loglikelihood in nats, and whether greedy decoding would produce the continuation;
# (float) a document's loglikelihood in nats.
Answer = str | tuple[float, bool] | float
_MAX_LISTED_DIFFERENCES = 20  # per task


class Document(msgspec.Struct, frozen=True):
    """The requests of one document, in order, and the answer to each.

    A document is lm_eval's term for one example of a task.

    Attributes:
        requests: each is [prompt] or [context, continuation].
        scores: the document's score in each metric, with the keys of
            `TaskAnswers.metrics`.
    """

    doc_id: int
    requests: list[list[str]]
    answers: list[Answer]
    scores: dict[str, float] = {}


class TaskAnswers(msgspec.Struct, frozen=True):
    """The documents of one task, sorted by id, and the task's metrics from lm_eval.

    Attributes:
        seconds: duration of the task.
    """

    documents: list[Document]
    metrics: dict[str, float]
    seconds: float = 0.0


class SavedAnswers(msgspec.Struct, frozen=True):
    """The file of --save: answers, and the settings that produced them."""

    settings: dict[str, Any]
    tasks: dict[str, TaskAnswers]


def documents_of(samples: Sequence[Mapping[str, Any]]) -> list[Document]:
    """Return the documents of lm_eval's samples, sorted by id.

    lm_eval has one sample per document and filter. The scores of all filters are merged
    into one Document.
    """
    documents: dict[int, Document] = {}
    for sample in samples:
        doc_id = sample["doc_id"]
        requests = [
            [argument for argument in arguments if isinstance(argument, str)]
            for arguments in sample["arguments"]
        ]
        answers = [_answer(responses[0]) for responses in sample["resps"]]
        scores = documents[doc_id].scores if doc_id in documents else {}
        filter_name = sample["filter"]
        results = {f"{name},{filter_name}": sample[name] for name in sample["metrics"]}
        scores |= metrics_of(results)
        documents[doc_id] = Document(doc_id, requests, answers, scores)
    return [documents[doc_id] for doc_id in sorted(documents)]


def _answer(response: Any) -> Answer:
    if isinstance(response, str):
        return response
    if isinstance(response, Sequence):
        loglikelihood, is_greedy = response
        return float(loglikelihood), bool(is_greedy)
    return float(response)


def compare(
    reference: TaskAnswers,
    measured: TaskAnswers,
    tolerance: float,
    *,
    same_prompts: bool = True,
) -> dict[str, Any]:
    """Compare the answers document by document; return figures of the differences.

    Texts and greediness must be equal, and loglikelihoods must be equal within
    `tolerance`. The figure `max_difference` is the largest difference of loglikelihoods
    (nats), regardless of differing texts or greediness.

    Args:
        same_prompts: whether both sides must have the same prompts. The prompts differ
            if only one side applies the chat template itself.

    Raises:
        ValueError: the two sides have different documents or prompts, or different
            numbers of requests.
    """
    reference_ids = [document.doc_id for document in reference.documents]
    measured_ids = [document.doc_id for document in measured.documents]
    if reference_ids != measured_ids:
        raise ValueError(
            f"the reference has documents {reference_ids}, the endpoint {measured_ids}"
        )
    gaps = [0.0]
    differences: list[str] = []
    differing_documents: set[int] = set()
    pairs = zip(reference.documents, measured.documents, strict=True)
    for expected, answered in pairs:
        doc_id = expected.doc_id
        if same_prompts and expected.requests != answered.requests:
            raise ValueError(
                f"document {doc_id}: the prompts of the endpoint and of the reference "
                "differ"
            )
        if len(expected.answers) != len(answered.answers):
            raise ValueError(
                f"document {doc_id} has {len(answered.answers)} requests at the "
                f"endpoint, but {len(expected.answers)} in the reference"
            )
        answer_pairs = zip(expected.answers, answered.answers, strict=True)
        for index, (want, have) in enumerate(answer_pairs):
            gap = _gap(want, have)
            gaps.append(gap)
            if not gap <= tolerance:  # also True for NaN
                differences.append(
                    f"document {doc_id}, request {index}: {want!r}, got {have!r}"
                )
                differing_documents.add(doc_id)
    return {
        "hf_metrics": reference.metrics,
        "hf_seconds": reference.seconds,
        "requests": len(gaps) - 1,
        "differing_documents": len(differing_documents),
        "max_difference": max(filter(math.isfinite, gaps)),
        "differences": differences[:_MAX_LISTED_DIFFERENCES],
    }


def compare_scores(
    reference: TaskAnswers, measured: TaskAnswers, max_difference: float
) -> dict[str, Any]:
    """Return each metric's mean difference of scores and its standard error.

    An accuracy is a metric with scores of only 0 and 1. The absolute mean difference of
    an accuracy plus two standard errors must be at most `max_difference`. The figure
    `differences` lists the accuracies that exceed this limit. All other metrics are
    reported, but not checked. A metric without a score per document is left out.
    """
    means: dict[str, tuple[float, float]] = {}
    differences = []
    for name in reference.metrics:
        pairs = [
            (expected.scores[name], answered.scores[name])
            for expected, answered in zip(
                reference.documents, measured.documents, strict=True
            )
            if name in expected.scores and name in answered.scores
        ]
        if len(pairs) < len(measured.documents):
            continue  # the metric has only one value for all documents together
        gaps = [have - want for want, have in pairs]
        standard_error = math.inf
        if len(gaps) > 1:
            standard_error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        mean = statistics.fmean(gaps)
        means[name] = (mean, standard_error)
        is_accuracy = all(score in (0, 1) for pair in pairs for score in pair)
        if is_accuracy and not abs(mean) + 2 * standard_error <= max_difference:
            differences.append(
                f"{name} differs by {mean:+.4f}, standard error {standard_error:.4f}"
            )
    return {"score_differences": means, "differences": differences}


def _gap(want: Answer, have: Answer) -> float:
    """Return the difference of two answers.

    This is the absolute difference of loglikelihoods, or 0 for equal texts. It is
    infinite if texts differ, or if greedy decoding would produce a continuation on only
    one side.
    """
    match want, have:
        case float(), float():
            return abs(want - have)
        case (float(want_nats), bool(want_greedy)), (float(nats), bool(is_greedy)):
            return abs(want_nats - nats) if want_greedy == is_greedy else math.inf
        case str(), str():
            # The hf backend decodes an output without its prompt. SentencePiece then
            # loses the space before the output.
            return 0.0 if want in (have, have.removeprefix(" ")) else math.inf
    return math.inf


def save(path: Path, settings: dict[str, Any], tasks: dict[str, TaskAnswers]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(SavedAnswers(settings, tasks)))


def load(path: Path, settings: Mapping[str, Any]) -> dict[str, TaskAnswers]:
    """Read a file that `save` wrote.

    Raises:
        ValueError: the file was made with settings that differ from `settings`.
    """
    saved = msgspec.json.decode(path.read_bytes(), type=SavedAnswers)
    for name, value in settings.items():
        saved_value = saved.settings.get(name)
        if saved_value != value:
            raise ValueError(
                f"{path} was made with {name} = {saved_value!r}, not {value!r}; "
                "make it again with --save"
            )
    return saved.tasks


def table(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a markdown table with one row per task.

    The reference's columns are empty for tasks without a reference.
    """
    rows = [
        "| task | documents | metrics (endpoint) | metrics (hf) | differing "
        "| max. difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, task in tasks.items():
        endpoint_metrics = _metrics_cell(task.get("metrics", {}))
        reference_metrics = _metrics_cell(task.get("hf_metrics", {}))
        differing = task.get("differing_documents", "")
        largest = ""
        if task.get("score_differences"):
            largest = ", ".join(
                f"{metric} {mean:+.4f} ± {error:.4f}"
                for metric, (mean, error) in task["score_differences"].items()
            )
        elif task.get("max_difference"):
            largest = f"{task['max_difference']:.1e}"
        rows.append(
            f"| {name} | {task['documents']} | {endpoint_metrics} "
            f"| {reference_metrics} | {differing} | {largest} |"
        )
    return "\n".join(rows)


def _metrics_cell(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())


def metrics_of(results: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of lm_eval's results, keyed "metric,filter".

    Standard errors are left out. The filter "none" is left out of a key.
    """
    return {
        name.removesuffix(",none"): float(value)
        for name, value in results.items()
        if "," in name and "_stderr" not in name and isinstance(value, (int, float))
    }
