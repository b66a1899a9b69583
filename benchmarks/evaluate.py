"""lm_eval on a running endpoint, held document by document against lm_eval's own `hf` backend.

    python -m benchmarks.evaluate --url http://127.0.0.1:8000 --tasks piqa --limit 40

Tasks are those in the folders of --include, and lm_eval's own, which download their data. The `hf`
backend loads --model in float32 on this machine; --reference none leaves it out, --save keeps its
answers for a later --reference. Texts and greediness must be equal, loglikelihoods to --tolerance;
of an endpoint that is quantised only what they score, as --accuracy says.
Prints a table and one JSON line; the status is 1 when a document differs.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.endpoint import get_model, open_session

# A generated text; a loglikelihood (nats) and whether it is the greedy continuation; the
# loglikelihood of a whole document.
Answer = str | tuple[float, bool] | float
_MOST_SHOWN = 20  # of a task's differences
_SETTINGS = (
    "limit",
    "max_length",
    "chat",
)  # that a saved reference must have been made with


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the endpoint, without /v1")
    add("--tasks", required=True, help="names of tasks, separated by commas")
    add("--limit", type=int, help="documents of each task (default: all)")
    add("--model", help="directory, GGUF file or hub name of the model that the endpoint serves, "
        "for its tokenizer and the reference (default: the default model)")  # fmt: skip
    add(
        "--chat",
        action="store_true",
        help="ask /v1/chat/completions; for generating tasks",
    )
    add(
        "--text-prompts",
        action="store_true",
        help="send prompts as text, not as token ids",
    )
    add("--concurrency", type=int, default=4, help="requests in flight")
    add(
        "--max-length",
        type=int,
        default=2048,
        help="longest prompt and output together (tokens)",
    )
    add("--reference", default="hf", help="`hf`, `none`, or a file that --save wrote")
    add("--save", type=Path, help="keeps the answers of hf, or with --reference none of the "
        "endpoint")  # fmt: skip
    add(
        "--tolerance",
        type=float,
        default=1e-3,
        help="largest difference of loglikelihoods (nats)",
    )
    add("--accuracy", type=float, help="compare scores instead: their mean difference and two "
        "standard errors of it are together at most this (0.05: five points)")  # fmt: skip
    add("--include", action="append", default=[], help="folder of further task files")
    add("--api-key", default="", help="sent as bearer token")
    return parser


# -- answers


class Document(msgspec.Struct, frozen=True):
    """One document's requests, in order, and what was answered to each."""

    doc_id: int
    requests: list[list[str]]  # [prompt] or [context, continuation]
    answers: list[Answer]
    scores: dict[str, float] = {}  # by metric, as TaskAnswers has their means


class TaskAnswers(msgspec.Struct, frozen=True):
    """One task's documents by id, and the metrics lm_eval makes of them."""

    documents: list[Document]
    metrics: dict[str, float]
    seconds: float = 0.0


class Saved(msgspec.Struct, frozen=True):
    """Answers with the settings they were got with: the file of --save."""

    settings: dict[str, Any]
    tasks: dict[str, TaskAnswers]


def documents_of(samples: Sequence[Mapping[str, Any]]) -> list[Document]:
    """Reads lm_eval's samples, which hold a document once for each of a task's filters."""
    found: dict[int, Document] = {}
    for sample in samples:
        doc_id = sample["doc_id"]
        requests = [
            [a for a in given if isinstance(a, str)] for given in sample["arguments"]
        ]
        answers = [_answer(responses[0]) for responses in sample["resps"]]
        scores = found[doc_id].scores if doc_id in found else {}
        scores |= _metrics(
            {f"{m},{sample['filter']}": sample[m] for m in sample["metrics"]}
        )
        found[doc_id] = Document(doc_id, requests, answers, scores)
    return [found[doc_id] for doc_id in sorted(found)]


def _answer(given: Any) -> Answer:
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence):
        loglikelihood, is_greedy = given
        return float(loglikelihood), bool(is_greedy)
    return float(given)


def compare(
    reference: TaskAnswers,
    got: TaskAnswers,
    tolerance: float,
    *,
    same_prompts: bool = True,
) -> dict[str, Any]:
    """Compares document by document: texts and greediness exactly, loglikelihoods to `tolerance`.
    Returns figures; `max_difference` is the largest of loglikelihoods (nats).

    Args:
        same_prompts: whether both were asked in the same words, as they are unless one of them
            applies the chat template itself.

    Raises:
        ValueError: these are not answers to the same documents.
    """
    ids = [
        [document.doc_id for document in side.documents] for side in (reference, got)
    ]
    if ids[0] != ids[1]:
        raise ValueError(f"the reference answered documents {ids[0]}, not {ids[1]}")
    gaps, different, documents = [0.0], [], set()
    for expected, answered in zip(reference.documents, got.documents, strict=True):
        doc_id = expected.doc_id
        if same_prompts and expected.requests != answered.requests:
            raise ValueError(f"document {doc_id} was asked in other words")
        if len(expected.answers) != len(answered.answers):
            raise ValueError(f"document {doc_id} has another number of requests")
        pairs = zip(expected.answers, answered.answers, strict=True)
        for index, (want, have) in enumerate(pairs):
            gaps.append(gap := _gap(want, have))
            if not gap <= tolerance:  # NaN is no answer
                different.append(
                    f"document {doc_id}, request {index}: {want!r}, got {have!r}"
                )
                documents.add(doc_id)
    return {
        "hf_metrics": reference.metrics,
        "hf_seconds": reference.seconds,
        "requests": len(gaps) - 1,
        "differing_documents": len(documents),
        "max_difference": max(filter(math.isfinite, gaps)),
        "differences": different[:_MOST_SHOWN],
    }


def compare_scores(
    reference: TaskAnswers, got: TaskAnswers, most: float
) -> dict[str, Any]:
    """The mean of the documents' differences in each score, and its standard error.

    An accuracy, 0 or 1 of a document, may differ by `most` with two standard errors added; other
    scores are only told.
    """
    means, different = {}, []
    for name in reference.metrics:
        pairs = [
            (each.scores[name], other.scores[name])
            for each, other in zip(reference.documents, got.documents, strict=True)
            if name in each.scores and name in other.scores
        ]
        if len(pairs) < len(got.documents):
            continue  # one of all documents together
        gaps, error = [have - want for want, have in pairs], math.inf
        if len(gaps) > 1:
            error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        mean, _ = means[name] = statistics.fmean(gaps), error
        is_accuracy = all(score in (0, 1) for pair in pairs for score in pair)
        if is_accuracy and not abs(mean) + 2 * error <= most:
            different.append(
                f"{name} differs by {mean:+.4f}, standard error {error:.4f}"
            )
    return {"score_differences": means, "differences": different}


def _gap(want: Answer, have: Answer) -> float:
    """The difference of two loglikelihoods; 0 or infinity for what is the same or is not."""
    match want, have:
        case float(), float():
            return abs(want - have)
        case (float(ours), bool(is_greedy)), (float(theirs), bool(was_greedy)):
            return abs(ours - theirs) if is_greedy == was_greedy else math.inf
        case str(), str():
            # hf decodes an output by itself, where SentencePiece loses the space before it
            return 0.0 if want in (have, have.removeprefix(" ")) else math.inf
    return math.inf


def save(path: Path, settings: dict[str, Any], tasks: dict[str, TaskAnswers]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(Saved(settings, tasks)))


def load(path: Path, settings: Mapping[str, Any]) -> dict[str, TaskAnswers]:
    """Reads what `save` wrote.

    Raises:
        ValueError: it was got with other settings.
    """
    saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    for name, value in settings.items():
        if (found := saved.settings.get(name)) != value:
            raise ValueError(
                f"{path} was made with {name} = {found!r}, not {value!r}; make it again"
            )
    return saved.tasks


def table(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """A markdown table, a row per task; the reference's columns are empty where it was not run."""
    rows = [
        "| task | documents | metrics (endpoint) | metrics (hf) | differing | max. difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, task in tasks.items():
        ours, theirs = (
            ", ".join(
                f"{metric} {value:.4g}" for metric, value in task.get(key, {}).items()
            )
            for key in ("metrics", "hf_metrics")
        )
        differing = task.get("differing_documents", "")
        worst = f"{task['max_difference']:.1e}" if task.get("max_difference") else ""
        means = task.get("score_differences", {}).items()
        worst = (
            ", ".join(f"{m} {x:+.4f} ± {error:.4f}" for m, (x, error) in means) or worst
        )
        rows.append(
            f"| {name} | {task['documents']} | {ours} | {theirs} | {differing} | {worst} |"
        )
    return "\n".join(rows)


# -- lm_eval


class Runner:
    """Runs lm_eval's tasks with either backend."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        from lm_eval.tasks import TaskManager

        self._options, self._model = options, model
        # The backends have unlike defaults, and a chat template writes the token itself.
        self._adds_bos = not options.chat and adds_bos(model)
        self._names = [
            name.strip() for name in options.tasks.split(",") if name.strip()
        ]
        self._tasks = TaskManager(include_path=options.include, include_defaults=False)
        if any(name not in self._tasks.all_tasks for name in self._names):
            self._tasks = TaskManager(
                include_path=options.include
            )  # slow: thousands of files
        unknown = [name for name in self._names if name not in self._tasks.all_tasks]
        if unknown or not self._names:
            raise ValueError(
                f"--tasks {options.tasks}: no task is called {', '.join(unknown)!r}"
            )

    def reference(self) -> dict[str, TaskAnswers]:
        """lm_eval's hf backend, in float32 on the CPU."""
        # The other backend keeps a token of its length free, and one more when it rolls.
        arguments = {
            "pretrained": str(self._model),
            "dtype": "float32",
            "device": "cpu",
            "max_length": self._options.max_length - 2,
            "add_bos_token": self._adds_bos,
        }
        return self._run("hf", arguments)

    def endpoint(self, served_model: str) -> dict[str, TaskAnswers]:
        """lm_eval's backend for endpoints of completions, or of chat completions."""
        options = self._options
        path = "chat/completions" if options.chat else "completions"
        arguments = {
            "base_url": f"{options.url}/v1/{path}",
            "model": served_model,
            "num_concurrent": options.concurrency,
            "max_retries": 1,
            "max_length": options.max_length,
        }
        if not options.chat:
            arguments |= {
                "tokenizer": str(self._model),
                "tokenizer_backend": "huggingface",
                "tokenized_requests": not options.text_prompts,
                "add_bos_token": self._adds_bos,
            }
        return self._run(f"local-{path.replace('/', '-')}", arguments)

    def _run(self, backend: str, arguments: dict[str, Any]) -> dict[str, TaskAnswers]:
        """A task at a time, so that each has its own time."""
        from lm_eval import simple_evaluate

        answers = {}
        for name in self._names:
            began = time.perf_counter()
            results = simple_evaluate(
                model=backend,
                model_args=dict(arguments),
                tasks=[name],
                limit=self._options.limit,
                task_manager=self._tasks,
                apply_chat_template=self._options.chat,
                log_samples=True,
                bootstrap_iters=0,
                batch_size=1,
            )
            assert results is not None, "only ranks above 0 get no results"
            (samples,) = results["samples"].values()
            (metrics,) = results["results"].values()
            seconds = round(time.perf_counter() - began, 1)
            answers[name] = TaskAnswers(
                documents_of(samples), _metrics(metrics), seconds
            )
        return answers


def adds_bos(model: Path) -> bool:
    """Whether the tokenizer in this directory begins every text with a token of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return len(tokenizer("a").input_ids) > len(
        tokenizer("a", add_special_tokens=False).input_ids
    )


def _metrics(results: dict[str, Any]) -> dict[str, float]:
    """lm_eval's "metric,filter": value, without standard errors; the filter only if it has one."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in results.items()
        if "," in name and "_stderr" not in name and isinstance(value, (int, float))
    }


# -- the program


async def _served_model(options: argparse.Namespace) -> str:
    async with open_session(options.url, 30.0, options.api_key) as session:
        return str((await get_model(session))["id"])


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything; returns the figures.

    Raises:
        ValueError, RuntimeError: options, endpoint and reference do not go together.
    """
    from model.hub import DEFAULT_MODEL, resolve_model

    model = resolve_model(options.model or DEFAULT_MODEL, None)
    settings = {name: getattr(options, name) for name in _SETTINGS}
    reference: dict[str, TaskAnswers] = {}
    if options.reference not in ("hf", "none"):
        reference = load(Path(options.reference), settings)
    served_model = asyncio.run(_served_model(options))
    runner = Runner(options, model)
    if options.reference == "hf":
        reference = runner.reference()
        if options.save:
            save(options.save, settings, reference)
    tasks: dict[str, dict[str, Any]] = {}
    answers = runner.endpoint(served_model)
    if options.reference == "none" and options.save:
        save(options.save, settings, answers)
    for name, task in answers.items():
        tasks[name] = {"documents": len(task.documents), "seconds": task.seconds}
        tasks[name]["metrics"] = task.metrics
        if told := reference.get(name):
            same = not options.chat
            tasks[name] |= compare(told, task, options.tolerance, same_prompts=same)
            if options.accuracy is not None:
                tasks[name] |= compare_scores(told, task, options.accuracy)
    figures = {"benchmark": "evaluate", "model": served_model, "url": options.url}
    return {**figures, **settings, "tasks": tasks}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the evaluation; 0 when no document differs from the reference."""
    options = make_parser().parse_args(argv)
    options.url = options.url.rstrip("/").removesuffix("/v1")
    os.environ["OPENAI_API_KEY"] = options.api_key  # where lm_eval looks for it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        figures = evaluate(options)
    except (ValueError, RuntimeError) as error:
        print(f"benchmarks.evaluate: error: {error}", file=sys.stderr)
        return 2
    tasks = figures["tasks"]
    different = [
        f"{name}: {d}" for name in tasks for d in tasks[name].get("differences", [])
    ]
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {figures['model']}, {options.url}\n"
    )
    print(table(tasks), *different, json.dumps(figures), sep="\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
